"""Launches on several nodes: SLURM, torchrun, Ray, or hosts that a command reaches.

A launcher of a cluster system is one file. What holds for every launch stays in ``plumbline.launch``.
"""
