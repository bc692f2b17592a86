"""A norm that every gradient exceeds, so that clipping decides about every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from harness.workloads.mlp import Mlp


class Clipping(Mlp):
    """The perceptron with gradients clipped to a fraction of their length; plain SGD."""

    name = "clipping"
    exposes = "clipping left out, after the step, before unscaling, before averaging, tensor by tensor, by value"
    needs: ClassVar[frozenset[str]] = frozenset({"clipping"})
    narrow = True
    clip_norm = 0.05

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with a rate that makes up for the short gradients."""
        return torch.optim.SGD(params, lr=1.0)
