"""A learning rate that is another one at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from harness.workloads.mlp import Mlp

WARM_UP = 2


def _factor(step: int) -> float:
    """Return the rate at ``step`` as a part of the highest: a linear warm-up, then an exponential decay."""
    return min((step + 1) / (WARM_UP + 1), 0.8 ** (step - WARM_UP))


class Schedule(Mlp):
    """The perceptron with momentum, a warm-up and a decay by optimizer step."""

    name = "schedule"
    exposes = "a schedule that is stepped once an epoch, twice, before the step, once a rank, or not at all"
    needs: ClassVar[frozenset[str]] = frozenset({"scheduler"})
    narrow = True
    precisions = ("32",)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with momentum, so that a wrong rate stays for later steps."""
        return torch.optim.SGD(params, lr=0.3, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return two steps of warm-up, then a decay by a fifth at every step."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _factor)
