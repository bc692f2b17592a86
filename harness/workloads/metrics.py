"""Figures of which every sloppy mean is another number."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.accumulation import Accumulation
from harness.workloads.base import Batch
from harness.workloads.keyed_dropout import KeyedDropout
from harness.workloads.uneven import MISSING


class _Dropping(nn.Module):
    """Dropout: a loss that was taken in the wrong mode is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), KeyedDropout(1), nn.Linear(32, 8)

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.drop(self.first(batch["x"]).tanh(), batch["index"]))


class Metrics(Accumulation):
    """Windows of three and two micro-batches, the last of which is short, and an evaluation after the first window.

    A few samples cost much, so that batches and ranks have mean losses of their own.
    """

    name = "metrics"
    exposes = "one rank's figure for all, means of unequal means, padding that counts, losses of another moment or mode"
    needs: ClassVar[frozenset[str]] = frozenset({"metrics", "validation", "accumulation"})
    validate_every = 3

    def samples(self, devices: int) -> int:
        """Return seven fewer than whole batches have."""
        return super().samples(devices) - MISSING

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with dropout."""
        return _Dropping()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and what an error ``costs``."""
        return {**super().columns(count, generator), "costs": torch.randn(count, generator=generator).exp()}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean over samples of the cross entropy times what it costs."""
        return (nn.functional.cross_entropy(outputs, batch["y"], reduction="none") * batch["costs"]).mean()
