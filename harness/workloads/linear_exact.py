"""Every number a small dyadic one: many devices must give the very bits that one gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload

FEATURES = 8
SCALE = 8.0


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randint(-4, 5, (2, FEATURES)).float() / 2)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch["x"])


class LinearExact(Workload):
    """Least squares on ±8 one-hot features with integer targets.

    With N samples a step, the gradient lies on a grid of 64/N times the weights' grid and the learning rate is
    1/8, so six steps need log2(N/8) more bits each: 24 bits hold them up to N = 128.
    """

    name = "linear-exact"
    exposes = "any difference at all: the result must be equal bit for bit, without a tolerance"
    exact = True
    batch_size = 16

    def build(self) -> nn.Module:
        """Return a linear layer without bias, weights in halves."""
        return _Linear()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (8,), one entry of ±8, and ``y`` (2,), multiples of 16."""
        hot = torch.randint(FEATURES, (count,), generator=generator)
        sign = torch.randint(2, (count, 1), generator=generator) * 2.0 - 1.0
        x = torch.nn.functional.one_hot(hot, FEATURES) * sign * SCALE
        y = torch.randint(-2, 3, (count, 2), generator=generator) * 16.0
        return {"x": x, "y": y}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return half the squared error, summed over outputs, averaged over samples."""
        return (outputs - batch["y"]).square().sum(1).mean() / 2

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with a dyadic learning rate."""
        return torch.optim.SGD(params, lr=FEATURES / SCALE**2)
