"""Clipping before an optimizer with a memory: a wrong norm stays in its moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from harness.workloads.mlp import Mlp


class ClippingAdamW(Mlp):
    """The perceptron, clipped at every step and stepped by AdamW."""

    name = "clipping-adamw"
    exposes = "wrong clipping that AdamW's indifference to scale would hide in the weights"
    needs: ClassVar[frozenset[str]] = frozenset({"clipping"})
    narrow = True
    precisions = ("32",)
    clip_norm = 0.05

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=0.01)
