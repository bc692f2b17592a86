"""The plain case: equal shares, a loss that is a mean over samples. Everybody must match one device here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(batch["x"])


class Mlp(Workload):
    """A two-layer perceptron that classifies random points; SGD, which hides no wrong scale."""

    name = "mlp"
    exposes = "wrong averages, missing synchronisation, wrong shards: no excuse for any difference"

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8, with biases."""
        return _Mlp()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,) and the class ``y`` (scalar, 0..7)."""
        return {
            "x": torch.randn(count, 16, generator=generator),
            "y": torch.randint(8, (count,), generator=generator),
        }

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch["y"])
