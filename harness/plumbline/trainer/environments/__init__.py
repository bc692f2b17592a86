"""Cluster environments: who this process is, and who starts the others."""

from __future__ import annotations

from collections.abc import Mapping

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.environments.plain import PlainEnvironment
from plumbline.trainer.environments.slurm import SlurmEnvironment
from plumbline.trainer.environments.torchrun import TorchrunEnvironment

ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (TorchrunEnvironment, SlurmEnvironment, PlainEnvironment)


def detect_environment(variables: Mapping[str, str]) -> ClusterEnvironment:
    """Return the first environment whose variables are set: torchrun (also inside SLURM), SLURM, plain."""
    return next(kind for kind in ENVIRONMENTS if kind.detect(variables))(variables)


__all__ = [
    "ENVIRONMENTS",
    "ClusterEnvironment",
    "PlainEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "detect_environment",
]
