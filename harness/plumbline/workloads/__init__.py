"""Training problems that are hard to get right, grouped into files by what they expose.

The built-in ones are instances of ``Workload``, by name in ``WORKLOADS``; ``register`` adds one from elsewhere. Nothing
here knows a trainer or the judge.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Mapping

from plumbline.workloads.accumulation import Accumulation, Metrics, Validation
from plumbline.workloads.basics import LinearExact, Mlp, Sequential, Uneven
from plumbline.workloads.checkpointing import CheckpointElastic, CheckpointExperts, CheckpointResume, CheckpointWindows
from plumbline.workloads.coupling import AccumulationTokens, CnnBatchNorm, Contrastive, LmTokens
from plumbline.workloads.dataset import Batch, Columns
from plumbline.workloads.experts import MixtureOfExperts
from plumbline.workloads.parameter_use import Frozen, Thawed, UnusedAtTheEnd, UnusedParameters
from plumbline.workloads.performance import PERFORMANCE
from plumbline.workloads.performance_workload import PerformanceWorkload
from plumbline.workloads.randomness import Dropout, RandomMasks
from plumbline.workloads.unusual_tensors import ClippingTied, EmbeddingSparse, NestedOutputs, Transformer
from plumbline.workloads.updates import (
    Adam,
    AdamW,
    Clipping,
    ClippingAdamW,
    Overflow,
    OverflowSchedule,
    ScheduledRate,
    ScheduleWindows,
    SeveralOptimizers,
)
from plumbline.workloads.workload import Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        LinearExact(),
        Mlp(),
        CnnBatchNorm(),
        Contrastive(),
        LmTokens(),
        Adam(),
        AdamW(),
        SeveralOptimizers(),
        ScheduledRate(),
        Clipping(),
        ClippingAdamW(),
        ClippingTied(),
        Accumulation(),
        AccumulationTokens(),
        ScheduleWindows(),
        Validation(),
        Metrics(),
        Sequential(),
        Uneven(),
        Dropout(),
        RandomMasks(),
        Transformer(),
        EmbeddingSparse(),
        NestedOutputs(),
        MixtureOfExperts(),
        Frozen(),
        UnusedParameters(),
        UnusedAtTheEnd(),
        Thawed(),
        Overflow(),
        OverflowSchedule(),
        CheckpointResume(),
        CheckpointWindows(),
        CheckpointElastic(),
        CheckpointExperts(),
    )
}

EVERY: Mapping[str, Workload] = ChainMap(PERFORMANCE, WORKLOADS)  # type: ignore[arg-type]  # it is only read
"""Those that are there for what they expose, then those that are there for their speed."""


def register(workload: Workload) -> None:
    """Add a workload from another package: it is planned, trained and judged like the others.

    Raises:
        ValueError: its name is taken.
    """
    if EVERY.get(workload.name, workload) is not workload:
        raise ValueError(f"there is already a workload {workload.name!r}: give this one another name")
    if isinstance(workload, PerformanceWorkload):
        PERFORMANCE[workload.name] = workload
    else:
        WORKLOADS[workload.name] = workload


def find(name: str, seed: int | None = None) -> Workload:
    """Return the workload called ``name``, with another seed if one is given."""
    workload = EVERY[name]
    if seed is not None:
        workload = copy.copy(workload)
        workload.seed = seed
    return workload


__all__ = [
    "EVERY",
    "PERFORMANCE",
    "WORKLOADS",
    "Batch",
    "Columns",
    "PerformanceWorkload",
    "Workload",
    "find",
    "register",
]
