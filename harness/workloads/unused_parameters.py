"""Parameters that a step may leave unused: one always, others wherever no sample of a rank asks for them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class Branching(nn.Module):
    """A perceptron with a layer, ``extra``, for the samples that are ``hard`` alone: without any it is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits, (batch, 8)."""
        hidden = self.first(batch["x"])
        hard = batch["hard"].nonzero().flatten()
        if len(hard):
            hidden = hidden.index_add(0, hard, self.extra(batch["x"][hard]).to(hidden.dtype))
        return self.last(hidden.tanh())


class _WithSpare(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 4)


class UnusedParameters(Mlp):
    """A perceptron with a layer that is never used, and a branch that one sample in ten takes."""

    name = "unused-parameters"
    exposes = "gradients left unreduced because another rank, or none, used a parameter; unused ones that move"
    needs: ClassVar[frozenset[str]] = frozenset({"unused-parameters"})
    unused_parameters = True
    narrow = True

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with a branch beside the first layer, and a spare layer."""
        return _WithSpare()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``hard``: whether the sample takes the branch."""
        return {**super().columns(count, generator), "hard": torch.arange(count) % 10 == 5}
