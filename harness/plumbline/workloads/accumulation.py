"""Gradient accumulation over windows of micro-batches, with evaluations and metrics within the windows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import MISSING, Mlp
from plumbline.workloads.dataset import Batch
from plumbline.workloads.randomness import KeyedDropout


class Accumulation(Mlp):
    """The perceptron with windows of three and two micro-batches. Inputs of unequal norm make micro-batches differ."""

    name = "accumulation"
    exposes = "micro-batches summed, divided twice, wiped, left unreduced; the short last window dropped or misjudged"
    needs: ClassVar[frozenset[str]] = frozenset({"accumulation"})
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("32", "16", "bf16", "bf16-true", "bf16-master")
    couples_stages = True
    accumulate = 3
    steps_per_epoch = 5

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), whose norm differs widely between samples, and the class ``y``."""
        columns = super().columns(count, generator)
        loudness = torch.randn(count, 1, generator=generator).exp()
        return {**columns, "x": columns["x"] * loudness}


class _WithBatchNormAndDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            KeyedDropout(1),
            nn.Linear(32, 8),
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.drop(self.norm(self.first(batch["x"])).tanh(), batch["index"]))


class Validation(Mlp):
    """BatchNorm and dropout with accumulation, evaluated after every second batch, within and between windows.

    All windows are complete. Other workloads cover short windows.
    """

    name = "validation"
    exposes = "an evaluation that wipes gradients, leaves the model in evaluation mode, or leaves its statistics behind"
    network: ClassVar[type[nn.Module]] = _WithBatchNormAndDropout
    blocks = 4
    needs: ClassVar[frozenset[str]] = frozenset({"validation", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 4
    steps_per_epoch = 8
    validate_every = 2


class _WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), KeyedDropout(1), nn.Linear(32, 8)

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.drop(self.first(batch["x"]).tanh(), batch["index"]))


class Metrics(Accumulation):
    """Windows of three and two micro-batches, the last one short, and an evaluation after the first window.

    A few samples have a large weight in the loss, so the mean loss differs between batches and between ranks.
    """

    name = "metrics"
    exposes = "one rank's figure for all, means of unequal means, padding that counts, losses of another moment or mode"
    network: ClassVar[type[nn.Module]] = _WithDropout
    needs: ClassVar[frozenset[str]] = frozenset({"metrics", "validation", "accumulation"})
    precisions = ("32", "16", "bf16-true")
    validate_every = 3

    def samples(self, devices: int) -> int:
        return super().samples(devices) - MISSING

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``costs``, the weight of the sample's loss."""
        return {**super().columns(count, generator), "costs": torch.randn(count, generator=generator).exp()}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return (nn.functional.cross_entropy(outputs, batch["y"], reduction="none") * batch["costs"]).mean()
