"""An evaluation in the middle of an accumulation window, which must leave no trace."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.keyed_dropout import KeyedDropout
from harness.workloads.mlp import Mlp


class _Modal(nn.Module):
    """Every layer that knows a training mode shows it: dropout in gradients, BatchNorm in its buffers too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            KeyedDropout(1),
            nn.Linear(32, 8),
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.drop(self.norm(self.first(batch["x"])).tanh(), batch["index"]))


class Validation(Mlp):
    """BatchNorm and dropout under accumulation, evaluated after every second batch: inside of windows, and between.

    Windows are whole: what a trainer makes of a short one, other workloads ask.
    """

    name = "validation"
    exposes = "an evaluation that wipes gradients, leaves the model in evaluation mode, or leaves its statistics behind"
    needs: ClassVar[frozenset[str]] = frozenset({"validation", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 4
    steps_per_epoch = 8
    validate_every = 2

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with BatchNorm and dropout."""
        return _Modal()
