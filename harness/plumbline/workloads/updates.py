"""From gradients to weights: optimizers, clipping, learning-rate schedules, and overflows in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp, Perceptron
from plumbline.workloads.dataset import Batch


class Adam(Mlp):
    """The perceptron with Adam."""

    name = "adam"
    exposes = "gradients of a wrong scale, which Adam hides in the weights; moments that are lost or per rank"
    stepped_by = (torch.optim.Adam, {"lr": 0.01})
    narrow = True
    precisions = ("32",)


class _Normalised(Perceptron):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8))


class AdamW(Mlp):
    """The perceptron with LayerNorm and AdamW, whose two groups differ in learning rate and weight decay."""

    name = "adamw"
    exposes = "parameter groups merged or reordered, decay where none is meant, moments that are lost"
    network: ClassVar[type[nn.Module]] = _Normalised
    blocks = 4
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("32", "64", "bf16-true", "bf16-master")

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        every = list(params)
        groups = [
            {"params": [p for p in every if p.dim() > 1], "lr": 0.01, "weight_decay": 0.3},
            {"params": [p for p in every if p.dim() <= 1], "lr": 0.02, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups)


TRUNK = 2
"""Number of parameters of the first layer: weight and bias. The others belong to the head."""


class SeveralOptimizers(Mlp):
    """The perceptron with SGD for its first layer and Adam for its second. Both step after the same backward pass."""

    name = "several-optimizers"
    exposes = "one of two optimizers that never steps, is not zeroed, or steps what is the other's"
    needs: ClassVar[frozenset[str]] = frozenset({"several-optimizers"})
    narrow = True
    couples_stages = True
    precisions = ("32",)

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        every = list(params)
        return [
            torch.optim.SGD(every[:TRUNK], lr=0.1, momentum=0.9),
            torch.optim.Adam(every[TRUNK:], lr=0.01),
        ]


class Clipping(Mlp):
    """The perceptron with gradients clipped to a fraction of their norm and plain SGD."""

    name = "clipping"
    exposes = "clipping left out, after the step, before unscaling, before averaging, tensor by tensor, by value"
    stepped_by = (torch.optim.SGD, {"lr": 1.0})
    needs: ClassVar[frozenset[str]] = frozenset({"clipping"})
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("32", "16", "bf16-true", "bf16-master")
    couples_stages = True
    clip_norm = 0.05


class ClippingAdamW(Mlp):
    """The perceptron with gradients clipped at every step and AdamW."""

    name = "clipping-adamw"
    exposes = "wrong clipping that AdamW's indifference to scale would hide in the weights"
    stepped_by = (torch.optim.AdamW, {"lr": 0.01})
    needs: ClassVar[frozenset[str]] = frozenset({"clipping"})
    narrow = True
    precisions = ("32",)
    clip_norm = 0.05


class ScheduledRate(Mlp):
    """The perceptron with momentum and a learning rate that warms up and decays by optimizer step."""

    name = "schedule"
    exposes = "a schedule that is stepped once an epoch, twice, before the step, once a rank, or not at all"
    stepped_by = (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})
    needs: ClassVar[frozenset[str]] = frozenset({"scheduler"})
    narrow = True
    precisions = ("32",)
    warm_up = (2, 0.8)


class ScheduleWindows(ScheduledRate):
    """``ScheduledRate`` with windows of two, two and one micro-batches."""

    name = "schedule-windows"
    exposes = "a schedule stepped for every micro-batch: the rate decays a window's length too fast"
    needs: ClassVar[frozenset[str]] = frozenset({"scheduler", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 5


class Muon(Mlp):
    """A perceptron without biases, trained with Muon, which orthogonalizes each update in bfloat16."""

    name = "muon"
    exposes = "matrices orthogonalized shard by shard; updates accused that differ by the order of bfloat16 sums"
    needs: ClassVar[frozenset[str]] = frozenset({"matrix-optimizer"})
    needs_torch = (2, 9)
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        return Perceptron(nn.Linear(16, 96, bias=False), nn.Tanh(), nn.Linear(96, 8, bias=False))

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=0.02)


GAIN = 2.0**12


class _Amplifying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        # Dividing and multiplying by a power of two is exact, but makes the gradient in between larger by that factor.
        gain = batch["gain"][:, None]
        return self.last(self.first(batch["x"]).tanh() / gain) * gain


class Overflow(Mlp):
    """The perceptron with one sample per epoch whose gradient between two layers is 4096 times that of the others.

    Loss scales from 2⁹ to 2¹⁶ or more make it exceed float16's range; in float32, bfloat16 and float64 it fits. Samples
    come in order, so the second of an epoch's three steps overflows, on the rank that has the sample.
    """

    name = "overflow"
    exposes = "overflows found by each rank alone, or ignored; steps that are skipped and move something all the same"
    network: ClassVar[type[nn.Module]] = _Amplifying
    blocks = 2
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("16", "32")
    shuffle = False

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``gain``: 1, or 4096 in the middle."""
        planned = torch.arange(count) == count // 2
        return {**super().columns(count, generator), "gain": torch.where(planned, GAIN, 1.0)}


class OverflowSchedule(Overflow, ScheduledRate):
    """Planned overflows with momentum and a learning rate that changes after every step taken."""

    name = "overflow-schedule"
    exposes = "a schedule, or a momentum, that goes on at a step which was skipped"
    precisions = ("16",)
