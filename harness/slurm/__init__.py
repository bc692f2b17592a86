"""SLURM's commands and batch scripts, and searches over hyper-parameters as job arrays.

``plumbline submit`` uses them in ``harness.submit.engines.slurm``; ranks inside a job are started by
``harness.launch.launchers.slurm``.
"""
