"""Submits a run, or a search over hyper-parameters, as a job array to a SLURM cluster.

Submitting, following and collecting belong here; ranks inside a job are started by ``harness.launch.launchers.slurm``.
"""
