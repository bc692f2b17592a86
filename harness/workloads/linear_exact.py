"""Every number a small dyadic one: many devices must give the very bits that one gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch, Workload

FEATURES = 8


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randint(-4, 5, (2, FEATURES)).float() / 8)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch["x"])


class LinearExact(Workload):
    """Least squares on one-hot features of ±1, weights in eighths, targets in halves.

    A step of N samples divides by N and multiplies by the learning rate, 8: log2(N/8) more bits each step, and
    the 24 of a float32 hold six steps up to N = 128. The sizes keep a loss scale of 65536 below float16's end.
    """

    name = "linear-exact"
    exposes = "any difference at all: the result must be equal bit for bit, without a tolerance"
    exact = True
    batch_size = 16

    def build(self) -> nn.Module:
        """Return a linear layer without bias."""
        return _Linear()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (8,), one entry of ±1, and ``y`` (2,), -1 to 1 in halves."""
        hot = torch.randint(FEATURES, (count,), generator=generator)
        sign = torch.randint(2, (count, 1), generator=generator) * 2.0 - 1.0
        x = nn.functional.one_hot(hot, FEATURES) * sign
        y = torch.randint(-2, 3, (count, 2), generator=generator) / 2
        return {"x": x, "y": y}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return half the squared error, summed over outputs, averaged over samples."""
        return (outputs - batch["y"]).square().sum(1).mean() / 2

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with a dyadic learning rate."""
        return torch.optim.SGD(params, lr=float(FEATURES))
