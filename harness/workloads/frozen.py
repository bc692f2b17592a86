"""Layers that must not move, between layers that must."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class _PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.first.weight.requires_grad_(False)
        self.middle.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.middle(self.first(batch["x"]).tanh()).tanh())


class Frozen(Mlp):
    """A three-layer perceptron whose middle is frozen; gradients flow through it to a bias that is not.

    Everything is handed to the optimizer, and its decay would move whatever has a gradient, be it zero.
    """

    name = "frozen"
    exposes = "frozen weights that are thawed, decayed through gradients of zero, or cut off what lies before them"
    needs: ClassVar[frozenset[str]] = frozenset({"frozen-parameters"})
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        """Return 16 → 32 → 32 → 8, of which the first bias and the last layer are trained."""
        return _PartlyFrozen()

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with weight decay."""
        return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)
