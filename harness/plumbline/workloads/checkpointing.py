"""Trainings that are interrupted and resumed by new processes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp
from plumbline.workloads.dataset import Batch
from plumbline.workloads.experts import MixtureOfExperts
from plumbline.workloads.updates import GAIN, AdamW


class _Remembering(nn.Module):
    """Subtracts the running average of its first layer's bias from that layer's output.

    Its buffers depend on the weights alone, not on which rank has which samples. If ``updates`` (a count) and
    ``average`` are lost, later outputs differ. Several forwards at the same weights, as with micro-batches, count once:
    ``latest`` is the bias at the last forward.
    """

    updates: Tensor
    average: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)
        self.register_buffer("updates", torch.tensor(0))
        self.register_buffer("average", torch.zeros(32))
        self.register_buffer("latest", torch.zeros(32))

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            with torch.no_grad():
                updated = (self.first.bias != self.latest).any()
                self.updates += updated
                self.average += updated * (self.first.bias - self.average) / self.updates
                self.latest.copy_(self.first.bias)
        # As in ``overflow``: dividing and multiplying by a power of two is exact, but makes the gradient in between
        # larger by that factor.
        gain = batch["gain"][:, None]
        return self.last((self.first(batch["x"]) - self.average).tanh() / gain) * gain


class CheckpointResume(Mlp):
    """The perceptron with momentum, a different learning rate at every step, buffers, and an overflow in every epoch.

    One sample causes the overflow, in float16 only. There the loss scale then differs from the initial one.
    """

    name = "checkpoint"
    exposes = "momentum, rate, loss scale, buffers, the epoch or the place in it lost where training is resumed"
    network: ClassVar[type[nn.Module]] = _Remembering
    warm_up = (3, 0.9)
    stepped_by = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})
    whole_layers = "its model reads a layer's biases beside the layer's forward"
    blocks = 2
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint", "scheduler"})
    narrow = True
    couples_stages = True
    steps_per_epoch = 6
    interrupt_after = 8

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``gain``: 1, or 4096 for one sample."""
        planned = torch.arange(count) == count // 2
        return {**super().columns(count, generator), "gain": torch.where(planned, GAIN, 1.0)}


class CheckpointWindows(Mlp):
    """The perceptron with momentum and windows of two and, last, one micro-batches, interrupted between two windows."""

    name = "checkpoint-windows"
    exposes = "a place in the epoch that is counted in steps where batches are meant, or the other way round"
    stepped_by = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 9
    interrupt_after = 7


class CheckpointElastic(AdamW):
    """AdamW with two parameter groups. A step has the same samples on two devices as on three."""

    name = "checkpoint-elastic"
    exposes = "moments or their count lost, a place in the epoch counted by each rank, when other ranks resume"
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint"})
    precisions = ("32",)
    steps_per_epoch = 8
    interrupt_after = 12
    elastic = True
    needs_epochs = "needs the same samples from another number of ranks"


class CheckpointExperts(MixtureOfExperts, CheckpointElastic):
    """The mixture of experts with AdamW. Each rank saves its experts; when resumed, ranks hold different experts."""

    name = "checkpoint-experts"
    exposes = "experts, or their moments, that are those of another rank, or new, when other ranks resume"
    precisions = ("32",)
