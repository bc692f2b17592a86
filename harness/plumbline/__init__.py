"""Plumbline: does a distributed trainer compute what one device computes?

It exports what a subject needs (``subject``, ``current_job`` and the reference ``Trainer``), and ``attach``, which
checks the training of the process that calls it. Names are imported when they are first used, so that pytest and the
workers start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbline.check.attach import attach
    from plumbline.check.callbacks.checked import checked
    from plumbline.check.callbacks.lightning_callback import LightningCallback as LightningCallback
    from plumbline.check.callbacks.transformers_callback import TransformersCallback as TransformersCallback
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
    "attach",
    "checked",
    "current_job",
    "subject",
]

# The callbacks are not in __all__, because importing them needs the library that they are for.
_HOMES = {
    "attach": "plumbline.check.attach",
    "checked": "plumbline.check.callbacks.checked",
    "LightningCallback": "plumbline.check.callbacks.lightning_callback",
    "TransformersCallback": "plumbline.check.callbacks.transformers_callback",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plumbline' has no attribute {name!r}")
    return getattr(import_uncollected(_HOMES[name]), name)


def import_uncollected(module: str) -> Any:
    """Import a module and return it, without garbage collection meanwhile.

    Objects that modules create stay alive. Searching them for garbage takes longer than creating them.
    """
    import gc
    import importlib

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()
