"""SLURM's commands and batch scripts, and searches over hyper-parameters as job arrays.

``plumbline submit`` uses them in ``plumbline.submit.engines.slurm``; ranks inside a job are started by
``plumbline.launch.launchers.slurm``.
"""
