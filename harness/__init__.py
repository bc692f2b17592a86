"""Plumbline: does a distributed trainer compute what one device computes?

What a subject needs is here: ``subject``, ``current_job``, and the reference ``Trainer``. Nothing is imported
before it is asked for, so that pytest and the workers start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.core.flat_part import FlatPart
    from harness.slurm.grid_search import HyperOptArgumentParser, SlurmCluster
    from harness.subjects.declare import subject
    from harness.trainer import Module, Trainer, TrainLoop
    from harness.worker.rank import current_job

__all__ = [
    "FlatPart",
    "HyperOptArgumentParser",
    "Module",
    "SlurmCluster",
    "TrainLoop",
    "Trainer",
    "current_job",
    "subject",
]

_HOMES = {
    "FlatPart": "harness.core.flat_part",
    "HyperOptArgumentParser": "harness.slurm.grid_search",
    "SlurmCluster": "harness.slurm.grid_search",
    "subject": "harness.subjects.declare",
    "current_job": "harness.worker.rank",
    "Trainer": "harness.trainer",
    "TrainLoop": "harness.trainer",
    "Module": "harness.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
