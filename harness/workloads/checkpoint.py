"""A training that is interrupted in the middle of its second epoch, with everything in it that can be forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp
from harness.workloads.overflow import GAIN

WARM_UP = 3


class _Remembering(nn.Module):
    """Subtracts the average of its biases so far: buffers that follow from the weights alone, whoever has which sample.

    ``forwards`` counts, and ``average`` remembers; without them the next forward computes something else.
    """

    forwards: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)
        self.register_buffer("forwards", torch.tensor(0))
        self.register_buffer("average", torch.zeros(32))

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.forwards += 1
                self.average += (self.first.bias - self.average) / self.forwards
        # As in ``overflow``: the power of two goes out and in again, and the gradient between is as much larger.
        gain = batch["gain"][:, None]
        return self.last((self.first(batch["x"]) - self.average).tanh() / gain) * gain


def _factor(step: int) -> float:
    """Return the rate at ``step`` as a part of the highest: a linear warm-up, then an exponential decay."""
    return min((step + 1) / (WARM_UP + 1), 0.9 ** (step - WARM_UP))


class Checkpoint(Mlp):
    """The perceptron with momentum, a rate of its own for every step, buffers, and an overflow in every epoch.

    The overflow, of one sample, is one in 16 bits only: there the loss scale is no longer what it was at first.
    """

    name = "checkpoint"
    exposes = "momentum, rate, loss scale, buffers, the epoch or the place in it lost where training is resumed"
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint", "scheduler"})
    narrow = True
    steps_per_epoch = 6
    interrupt_after = 8

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with buffers."""
        return _Remembering()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``gain``: 1, or 4096 for one sample."""
        planned = torch.arange(count) == count // 2
        return {**super().columns(count, generator), "gain": torch.where(planned, GAIN, 1.0)}

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(params, lr=0.2, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return three steps of warm-up, then a decay by a tenth at every step."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
