"""The accelerator lane: what must be run on a machine with devices, in stages with time limits, and the report.

It needs the standard library only: it prepares the environment that the stages run in.
"""
