"""The CUDA lane: what must be run on a machine with GPUs, in stages with time limits, and the report about it.

It needs the standard library only: it prepares the environment that the stages run in.
"""
