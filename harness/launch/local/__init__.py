"""Launches on this machine: simulated devices, or the CUDA devices it has.

Nothing that needs a second machine belongs here.
"""
