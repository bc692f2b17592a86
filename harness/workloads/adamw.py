"""AdamW with parameter groups: matrices decay, biases and norms do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch
from harness.workloads.mlp import Mlp


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(batch["x"])


class AdamW(Mlp):
    """The perceptron with LayerNorm and AdamW; two groups with a rate and a decay of their own."""

    name = "adamw"
    exposes = "parameter groups merged or reordered, decay where none is meant, moments that are lost"
    narrow = True
    precisions = ("32", "64")

    def build(self) -> nn.Module:
        """Return 16 → 32 → 8 with LayerNorm."""
        return _Normed()

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return AdamW over two groups, by dimension: matrices, and vectors (biases, norms) without decay."""
        every = list(params)
        groups = [
            {"params": [p for p in every if p.dim() > 1], "lr": 0.01, "weight_decay": 0.3},
            {"params": [p for p in every if p.dim() <= 1], "lr": 0.02, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups)
