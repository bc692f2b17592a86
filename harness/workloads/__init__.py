"""Training problems that are hard to get right. One file a workload, one line here."""

from __future__ import annotations

import copy

from harness.workloads.accumulation import Accumulation
from harness.workloads.accumulation_tokens import AccumulationTokens
from harness.workloads.adam import Adam
from harness.workloads.adamw import AdamW
from harness.workloads.base import Batch, Columns, Workload
from harness.workloads.checkpoint import Checkpoint
from harness.workloads.checkpoint_elastic import CheckpointElastic
from harness.workloads.checkpoint_windows import CheckpointWindows
from harness.workloads.clipping import Clipping
from harness.workloads.clipping_adamw import ClippingAdamW
from harness.workloads.cnn_batchnorm import CnnBatchNorm
from harness.workloads.contrastive import Contrastive
from harness.workloads.dropout import Dropout
from harness.workloads.embedding_sparse import EmbeddingSparse
from harness.workloads.frozen import Frozen
from harness.workloads.linear_exact import LinearExact
from harness.workloads.lm_tokens import LmTokens
from harness.workloads.metrics import Metrics
from harness.workloads.mlp import Mlp
from harness.workloads.nested_outputs import NestedOutputs
from harness.workloads.overflow import Overflow
from harness.workloads.overflow_schedule import OverflowSchedule
from harness.workloads.performance import PERFORMANCE, PerformanceWorkload
from harness.workloads.random_masks import RandomMasks
from harness.workloads.schedule import Schedule
from harness.workloads.schedule_windows import ScheduleWindows
from harness.workloads.sequential import Sequential
from harness.workloads.several_optimizers import SeveralOptimizers
from harness.workloads.thawed import Thawed
from harness.workloads.transformer import Transformer
from harness.workloads.uneven import Uneven
from harness.workloads.unused_at_the_end import UnusedAtTheEnd
from harness.workloads.unused_parameters import UnusedParameters
from harness.workloads.validation import Validation

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
        Schedule(),
        Clipping(),
        ClippingAdamW(),
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
        Frozen(),
        UnusedParameters(),
        UnusedAtTheEnd(),
        Thawed(),
        Overflow(),
        OverflowSchedule(),
        Checkpoint(),
        CheckpointWindows(),
        CheckpointElastic(),
    )
}

EVERY: dict[str, Workload] = {**WORKLOADS, **PERFORMANCE}
"""Those that are there for what they expose, and those that are there for their speed."""


def find(name: str, seed: int | None = None) -> Workload:
    """Return the workload called ``name``, with another seed than its own if one is given."""
    workload = EVERY[name]
    if seed is not None:
        workload = copy.copy(workload)
        workload.seed = seed
    return workload


__all__ = ["EVERY", "PERFORMANCE", "WORKLOADS", "Batch", "Columns", "PerformanceWorkload", "Workload", "find"]
