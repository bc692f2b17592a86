"""Hyper-parameter searches on a SLURM cluster: a trial is an array task, and each of its ranks runs the script."""

from harness.cluster.hyperparameters import HyperOptArgumentParser, Hyperparameters
from harness.cluster.slurm import SlurmCluster

__all__ = ["HyperOptArgumentParser", "Hyperparameters", "SlurmCluster"]
