"""A layer that is frozen in the first epoch and trained in the second, while nobody tells the trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class _ThawsLater(nn.Module):
    """Counts its training forwards; ``late`` is used without a gradient in the first ``frozen_for`` of them."""

    seen: Tensor

    def __init__(self, frozen_for: int) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.frozen_for = frozen_for
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, batch: Batch) -> Tensor:
        frozen = int(self.seen) < self.frozen_for
        if self.training:
            self.seen += 1
        weight, bias = self.late.weight, self.late.bias
        if frozen:
            weight, bias = weight.detach(), bias.detach()
        hidden = nn.functional.linear(self.first(batch["x"]).tanh(), weight, bias)
        return self.last(hidden.tanh())


class Thawed(Mlp):
    """A three-layer perceptron whose middle layer has no gradient in the first epoch, and one in the second.

    It requires gradients all the time; the optimizer's decay would move it as soon as it is handed one, be it zero.
    """

    name = "thawed"
    exposes = "a layer without a gradient that decays all the same, and that is never trained when its time has come"
    needs: ClassVar[frozenset[str]] = frozenset({"unused-parameters"})
    unused_parameters = True
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        """Return 16 → 32 → 32 → 8."""
        return _ThawsLater(self.steps_per_epoch)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with momentum and weight decay."""
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
