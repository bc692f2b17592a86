"""A classifier in three sizes: the limit of detection depends on how many entries a gradient has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plumbline.workloads import Batch, Workload


class _Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 8)

    def forward(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.head(self.layers(batch["x"]))
        return outputs


class Small(Workload):
    """16 inputs, two hidden layers, 8 classes."""

    name = "power-small"
    exposes = "how the limit of detection depends on the size of a model"
    width = 4
    steps_per_epoch = 3
    epochs = 1

    def build(self) -> nn.Module:
        """Return the model."""
        return _Perceptron(self.width)

    def columns(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return ``x`` and its class ``y``."""
        return {
            "x": torch.randn(count, 16, generator=generator),
            "y": torch.randint(8, (count,), generator=generator),
        }

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, batch["y"])


class Medium(Small):
    """Like ``Small``, but wider."""

    name = "power-medium"
    width = 32


class Large(Small):
    """Wider still: 71,000 parameters."""

    name = "power-large"
    width = 256
