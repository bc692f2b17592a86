"""Training problems that are hard to get right, grouped into files by the kind of mistake that they expose.

``WORKLOADS`` maps names to the built-in instances of ``Workload``; ``register`` adds one from another package. This
package is independent of trainers and of the judge.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Mapping

from plumbline.workloads import (
    accumulation,
    basics,
    checkpointing,
    coupling,
    experts,
    parameter_use,
    randomness,
    unusual_tensors,
    updates,
)
from plumbline.workloads.dataset import Batch, Columns
from plumbline.workloads.performance import PERFORMANCE
from plumbline.workloads.performance_workload import PerformanceWorkload
from plumbline.workloads.workload import Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        basics.LinearExact(),
        basics.Mlp(),
        coupling.CnnBatchNorm(),
        coupling.Contrastive(),
        coupling.LmTokens(),
        updates.Adam(),
        updates.AdamW(),
        updates.SeveralOptimizers(),
        updates.ScheduledRate(),
        updates.Clipping(),
        updates.ClippingAdamW(),
        updates.Muon(),
        unusual_tensors.ClippingTied(),
        accumulation.Accumulation(),
        coupling.AccumulationTokens(),
        updates.ScheduleWindows(),
        accumulation.Validation(),
        accumulation.Metrics(),
        basics.Sequential(),
        basics.Uneven(),
        randomness.Dropout(),
        randomness.RandomMasks(),
        unusual_tensors.Transformer(),
        unusual_tensors.EmbeddingSparse(),
        unusual_tensors.NestedOutputs(),
        experts.MixtureOfExperts(),
        experts.ClippingExperts(),
        experts.AccumulationExperts(),
        parameter_use.Frozen(),
        parameter_use.Adapter(),
        parameter_use.UnusedParameters(),
        parameter_use.UnusedAtTheEnd(),
        parameter_use.Thawed(),
        updates.Overflow(),
        updates.OverflowSchedule(),
        checkpointing.CheckpointResume(),
        checkpointing.CheckpointWindows(),
        checkpointing.CheckpointElastic(),
        checkpointing.CheckpointExperts(),
    )
}

EVERY: Mapping[str, Workload] = ChainMap(PERFORMANCE, WORKLOADS)  # type: ignore[arg-type]  # it is only read
"""All workloads: those that expose mistakes, then those that measure performance."""


def register(workload: Workload) -> None:
    """Add a workload from another package. It is then planned, trained and judged like the others.

    Raises:
        ValueError: another workload has this name.
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
