"""Dropout as everybody writes it: masks come from torch's generator, and must be others everywhere."""

from __future__ import annotations

from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.drawn_dropout import DrawnDropout
from harness.workloads.mlp import Mlp

UNITS = 64
"""So many coins a sample and a layer that two samples have the same ones by accident once in 2⁶⁴ pairs."""


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, 8)
        self.drop_first, self.drop_middle = DrawnDropout("coins 1"), DrawnDropout("coins 2")

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.drop_first(self.first(batch["x"]).tanh(), batch)
        return self.last(self.drop_middle(self.middle(hidden).tanh(), batch))


class RandomMasks(Mlp):
    """A three-layer perceptron with two layers of dropout whose masks are drawn at random."""

    name = "random-masks"
    exposes = "masks that are the same on several ranks, devices, or steps; no masks at all"
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        """Return 16 → 64 → 64 → 8 with dropout between."""
        return _Dropping()
