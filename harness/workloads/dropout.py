"""Dropout that is the same on any number of devices, as its masks follow from the samples' ids."""

from __future__ import annotations

from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.keyed_dropout import KeyedDropout
from harness.workloads.mlp import Mlp


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)
        self.drop_first = KeyedDropout(1)
        self.drop_middle = KeyedDropout(2)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.drop_first(self.first(batch["x"]).tanh(), batch["index"])
        return self.last(self.drop_middle(self.middle(hidden).tanh(), batch["index"]))


class Dropout(Mlp):
    """A three-layer perceptron with two layers of keyed dropout."""

    name = "dropout"
    exposes = "training in evaluation mode, columns of a batch that no longer belong to each other"
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        """Return 16 → 32 → 32 → 8 with dropout between."""
        return _Dropping()
