"""Plumbline: does a distributed trainer compute what one device computes?

What a subject needs is here: ``subject``, ``current_job``, and the reference ``Trainer``. Nothing is imported
before it is asked for, so that pytest and the workers start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbline.core.mesh import FlatPart, Part
    from plumbline.slurm.grid_search import HyperOptArgumentParser, SlurmCluster
    from plumbline.subjects.declare import subject
    from plumbline.trainer import Module, Trainer, TrainLoop
    from plumbline.worker.rank import current_job

__all__ = [
    "FlatPart",
    "HyperOptArgumentParser",
    "Module",
    "Part",
    "SlurmCluster",
    "TrainLoop",
    "Trainer",
    "current_job",
    "subject",
]

_HOMES = {
    "FlatPart": "plumbline.core.mesh",
    "Part": "plumbline.core.mesh",
    "HyperOptArgumentParser": "plumbline.slurm.grid_search",
    "SlurmCluster": "plumbline.slurm.grid_search",
    "subject": "plumbline.subjects.declare",
    "current_job": "plumbline.worker.rank",
    "Trainer": "plumbline.trainer",
    "TrainLoop": "plumbline.trainer",
    "Module": "plumbline.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plumbline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
