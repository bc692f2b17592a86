"""Two optimizers, each with its own part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from harness.workloads.mlp import Mlp

TRUNK = 2
"""The first layer's weight and bias; the rest is the head."""


class SeveralOptimizers(Mlp):
    """The perceptron, with SGD for its first layer and Adam for its second; both step after the same loss."""

    name = "several-optimizers"
    exposes = "one of two optimizers that never steps, is not zeroed, or steps what is the other's"
    needs: ClassVar[frozenset[str]] = frozenset({"several-optimizers"})
    narrow = True
    precisions = ("32",)

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        """Return SGD with momentum over the first layer's parameters, and Adam over the others."""
        every = list(params)
        return [
            torch.optim.SGD(every[:TRUNK], lr=0.1, momentum=0.9),
            torch.optim.Adam(every[TRUNK:], lr=0.01),
        ]
