"""Adam: two moments and a count of steps, all of which must survive every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from harness.workloads.mlp import Mlp


class Adam(Mlp):
    """The perceptron with Adam."""

    name = "adam"
    exposes = "gradients of a wrong scale, which Adam hides in the weights; moments that are lost or per rank"
    narrow = True
    precisions = ("32",)

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(params, lr=0.01)
