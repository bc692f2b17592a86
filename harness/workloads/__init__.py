"""Training problems that are hard to get right. One file a workload, one line here."""

from __future__ import annotations

from harness.workloads.base import Batch, Columns, Workload
from harness.workloads.cnn_batchnorm import CnnBatchNorm
from harness.workloads.contrastive import Contrastive
from harness.workloads.linear_exact import LinearExact
from harness.workloads.lm_tokens import LmTokens
from harness.workloads.mlp import Mlp

WORKLOADS: dict[str, Workload] = {
    workload.name: workload for workload in (LinearExact(), Mlp(), CnnBatchNorm(), Contrastive(), LmTokens())
}

__all__ = ["WORKLOADS", "Batch", "Columns", "Workload"]
