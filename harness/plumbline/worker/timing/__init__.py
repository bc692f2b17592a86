"""Measures a rank's steps: time, memory and communication.

A timed launch is not recorded, so nothing here may depend on ``recording``.
"""
