"""A layer that is left unused in the very last step, after which nobody complains."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp
from harness.workloads.unused_parameters import Branching


class UnusedAtTheEnd(Mlp):
    """A perceptron with a branch that every sample takes, except in the last step.

    DistributedDataParallel without ``find_unused_parameters`` leaves a whole bucket unreduced then, and raises at the
    next forward (https://github.com/pytorch/pytorch/issues/128949). Here there is none: one epoch, in order.
    """

    name = "unused-at-the-end"
    exposes = "a bucket left unreduced in the last step, which DistributedDataParallel would only notice in the next"
    needs: ClassVar[frozenset[str]] = frozenset({"unused-parameters"})
    unused_parameters = True
    narrow = True
    precisions = ("32",)
    epochs = 1
    shuffle = False

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with a branch beside the first layer."""
        return Branching()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``hard``: whether the sample takes the branch."""
        before_last_step = torch.arange(count) < count - count // self.steps_per_epoch
        return {**super().columns(count, generator), "hard": before_last_step}
