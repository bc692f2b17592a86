"""A training that is interrupted where steps and batches are not the same number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from harness.workloads.mlp import Mlp


class CheckpointWindows(Mlp):
    """The perceptron with momentum and windows of two and one micro-batches, interrupted between two windows."""

    name = "checkpoint-windows"
    exposes = "a place in the epoch that is counted in steps where batches are meant, or the other way round"
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 9
    interrupt_after = 7

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
