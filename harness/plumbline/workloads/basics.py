"""Plain problems whose loss is a mean over samples: the basic ones, an exact one, an unshuffled one, an uneven one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch
from plumbline.workloads.workload import Workload


class Perceptron(nn.Module):
    """Applies layers in sequence to column ``x`` of a batch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(batch["x"])


def warm_up_then_decay(step: int, warm_up: int, decay: float) -> float:
    """Return the learning rate at ``step`` relative to its maximum: a linear warm-up, then an exponential decay."""
    return min((step + 1) / (warm_up + 1), decay ** (step - warm_up))


class Plain(Workload):
    """A workload defined by a model class, an optimizer with its options, and a learning-rate schedule.

    ``warm_up`` has the number of warm-up steps and the decay factor of each later step; None: a constant rate.
    """

    network: ClassVar[type[nn.Module]]
    stepped_by: ClassVar[tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]] = (torch.optim.SGD, {"lr": 0.1})
    warm_up: ClassVar[tuple[int, float] | None] = None

    def build(self) -> nn.Module:
        return self.network()

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        make, options = self.stepped_by
        return make(params, **options)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        if (rate := self.warm_up) is None:
            return None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_decay(step, *rate))


class _TwoLayers(Perceptron):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


class Mlp(Plain):
    """A two-layer perceptron that classifies random points, trained with SGD, which does not hide a wrong scale."""

    name = "mlp"
    exposes = "wrong averages, missing synchronisation, wrong shards: no excuse for any difference"
    network: ClassVar[type[nn.Module]] = _TwoLayers
    blocks = 3

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,) and the class ``y`` (scalar, 0..7)."""
        return {
            "x": torch.randn(count, 16, generator=generator),
            "y": torch.randint(8, (count,), generator=generator),
        }


FEATURES = 8


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randint(-4, 5, (2, FEATURES)).float() / 8)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch["x"])


class LinearExact(Plain):
    """Least squares on one-hot features of ±1, weights in eighths, targets in halves.

    A step of N samples divides by N and multiplies by the learning rate 8, which adds log2(N/8) bits to the weights.
    The 24 significant bits of a float32 suffice for six steps up to N = 128. The values are small enough that a loss
    scale of 65536 stays within float16's range.
    """

    name = "linear-exact"
    exposes = "any difference at all: the result must be equal bit for bit, without a tolerance"
    network: ClassVar[type[nn.Module]] = _Linear
    stepped_by = (torch.optim.SGD, {"lr": float(FEATURES)})
    blocks = 1
    exact = True
    batch_size = 16

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (8,), zero but for one entry of ±1, and ``y`` (2,), multiples of 1/2 from -1 to 1."""
        hot = torch.randint(FEATURES, (count,), generator=generator)
        sign = torch.randint(2, (count, 1), generator=generator) * 2.0 - 1.0
        x = nn.functional.one_hot(hot, FEATURES) * sign
        y = torch.randint(-2, 3, (count, 2), generator=generator) / 2
        return {"x": x, "y": y}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return half the squared error, summed over outputs, averaged over samples."""
        error: Tensor = outputs - batch["y"]
        return error.square().sum(1).mean() / 2


class Sequential(Mlp):
    """The perceptron without shuffling."""

    name = "sequential"
    exposes = "shuffling that nobody asked for, contiguous shards in the place of interleaved ones"
    narrow = True
    precisions = ("32",)
    shuffle = False
    needs_epochs = "needs the order of an epoch"


MISSING = 7


class Uneven(Mlp):
    """The perceptron with a last batch that is seven samples short."""

    name = "uneven"
    exposes = "a tail that is dropped, or padded with more repeats than there are ranks; chunks of unequal size"
    narrow = True
    precisions = ("32",)
    needs_epochs = "needs the last batch of an epoch"

    def samples(self, devices: int) -> int:
        return super().samples(devices) - MISSING
