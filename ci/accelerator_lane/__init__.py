"""The accelerator lane: stages for a machine with devices, their time limits, and the report.

It uses only the standard library, because it prepares the environment that the stages run in.
"""
