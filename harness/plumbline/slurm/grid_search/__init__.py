"""Hyper-parameter searches on a SLURM cluster: a trial is an array task, and each of its ranks runs the script."""

from plumbline.slurm.grid_search.cluster import SlurmCluster
from plumbline.slurm.grid_search.hyperparameters import HyperOptArgumentParser, Hyperparameters

__all__ = ["HyperOptArgumentParser", "Hyperparameters", "SlurmCluster"]
