"""Parameters that are frozen, with or without adapters; unused, always or in some steps or on some ranks; or thawed."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp
from plumbline.workloads.dataset import Batch


class _PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.first.weight.requires_grad_(False)
        self.middle.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.middle(self.first(batch["x"]).tanh()).tanh())


class Frozen(Mlp):
    """A three-layer perceptron whose middle is frozen. Gradients flow through it to the first layer's trainable bias.

    The optimizer gets all parameters. Its weight decay would move any frozen one that has a gradient, even zero.
    """

    name = "frozen"
    exposes = "frozen weights that are thawed, decayed through gradients of zero, or cut off what lies before them"
    network: ClassVar[type[nn.Module]] = _PartlyFrozen
    stepped_by = (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1})
    needs: ClassVar[frozenset[str]] = frozenset({"frozen-parameters"})
    narrow = True
    precisions = ("32",)


RANK = 4


class Adapted(nn.Module):
    """A frozen layer ``base`` plus a trainable product of rank ``RANK``, ``up`` after ``down``, initially zero.

    https://arxiv.org/abs/2106.09685
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class _WithAdapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Adapted(16, 32), Adapted(32, 32), Adapted(32, 8)
        self.last.down.weight = self.middle.down.weight

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.middle(self.first(batch["x"]).tanh()).tanh())


class Adapter(Mlp):
    """A frozen three-layer perceptron with low-rank adapters, two of which share a factor.

    The optimizer gets all parameters. Its weight decay would move any frozen one that has a gradient, even zero.
    """

    name = "adapter"
    exposes = "adapters missing from the optimizer, trained apart on each rank or on one; frozen weights that decay"
    network: ClassVar[type[nn.Module]] = _WithAdapters
    stepped_by = (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1})
    blocks = 3
    whole_layers = "adapters share a factor, and a layer's output is its sum with one"
    needs: ClassVar[frozenset[str]] = frozenset({"frozen-parameters"})
    adapters = True
    narrow = True
    precisions = ("32",)


class Branching(nn.Module):
    """A perceptron with a layer, ``extra``, for ``hard`` samples only. A batch without hard samples does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def configure_blocks(self) -> list[nn.Module]:
        """Return the layers that every batch uses. A pipeline is split only between them."""
        return [self.first, self.last]

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.first(batch["x"])
        hard = batch["hard"].nonzero().flatten()
        if len(hard):
            hidden = hidden.index_add(0, hard, self.extra(batch["x"][hard]).to(hidden.dtype))
        return self.last(hidden.tanh())


class _WithSpare(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 4)


class UnusedParameters(Mlp):
    """A perceptron with a layer that is never used, and a branch that one sample in ten takes."""

    name = "unused-parameters"
    exposes = "gradients left unreduced because another rank, or none, used a parameter; unused ones that move"
    network: ClassVar[type[nn.Module]] = _WithSpare
    blocks = 2
    needs: ClassVar[frozenset[str]] = frozenset({"unused-parameters"})
    unused_parameters = True
    narrow = True

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``hard``: whether the sample takes the branch."""
        return {**super().columns(count, generator), "hard": torch.arange(count) % 10 == 5}


class UnusedAtTheEnd(UnusedParameters):
    """A perceptron with a branch that every sample takes, except in the last step.

    DistributedDataParallel without ``find_unused_parameters`` then leaves a whole bucket unreduced, and raises at the
    next forward (https://github.com/pytorch/pytorch/issues/128949). Here no forward follows: there is one epoch, in
    order.
    """

    name = "unused-at-the-end"
    exposes = "a bucket left unreduced in the last step, which DistributedDataParallel would only notice in the next"
    network: ClassVar[type[nn.Module]] = Branching
    precisions = ("32",)
    epochs = 1
    shuffle = False

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``hard``: whether the sample takes the branch."""
        before_last_step = torch.arange(count) < count - count // self.steps_per_epoch
        return {**super().columns(count, generator), "hard": before_last_step}


class _ThawsLater(nn.Module):
    """A perceptron whose layer ``late`` gets no gradient at the first ``frozen_for`` weights that it is trained at.

    ``seen`` counts distinct weights. Several forwards at the same weights, as with micro-batches, count once:
    ``latest`` is the bias at the last forward.
    """

    seen: Tensor
    latest: Tensor

    def __init__(self, frozen_for: int) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.frozen_for = frozen_for
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("latest", torch.zeros(32))

    def forward(self, batch: Batch) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += (self.first.bias != self.latest).any()
                self.latest.copy_(self.first.bias)
        weight: Tensor = self.late.weight
        bias: Tensor = self.late.bias
        if int(self.seen) <= self.frozen_for:
            weight, bias = weight.detach(), bias.detach()
        hidden = nn.functional.linear(self.first(batch["x"]).tanh(), weight, bias)
        return self.last(hidden.tanh())


class Thawed(Mlp):
    """A three-layer perceptron whose middle layer gets no gradient in the first epoch, and gets one in the second.

    Its parameters always have ``requires_grad``. The optimizer's decay would move them if they got a gradient of zero.
    """

    name = "thawed"
    exposes = "a layer without a gradient that decays all the same, and that is never trained when its time has come"
    stepped_by = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    blocks = 2
    needs: ClassVar[frozenset[str]] = frozenset({"unused-parameters"})
    unused_parameters = True
    narrow = True
    precisions = ("32",)

    def build(self) -> nn.Module:
        return _ThawsLater(self.steps_per_epoch)
