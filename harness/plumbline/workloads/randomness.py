"""Dropout with masks that depend only on the samples' ids, and with masks drawn from torch's generator."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp
from plumbline.workloads.dataset import Batch

BITS = 32


class KeyedDropout(nn.Module):
    """Drops half of the units of each sample, chosen by a hash of the sample's id, ``layer`` and the unit.

    Each layer of a model must have a different number ``layer``.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Return ``x`` (batch, units) with half of it dropped and the rest doubled; unchanged in evaluation."""
        if not self.training:
            return x
        unit = torch.arange(x.shape[1], device=x.device)
        kept = scramble(scramble(index[:, None] + (self.layer << 16)) + unit) >> (BITS - 1)
        return x * (2 * kept).to(x.dtype)


def scramble(key: Tensor) -> Tensor:
    """Return a hash of each integer, 0 to 2³²-1.

    The constant is C. Wellons', https://github.com/skeeto/hash-prospector. No product exceeds an int64.
    """
    for _ in range(2):
        key = ((key ^ (key >> 16)) * 0x45D9F3B) & (2**BITS - 1)
    return key ^ (key >> 16)


class DropoutMasks(nn.Module):
    """Draws the mask of a dropout layer that keeps half of its units, independently for each unit of each sample.

    A forward hook can record the mask. If the batch has a column named ``draws``, with a row for each sample, that
    column is the mask and nothing is drawn.
    """

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, like: Tensor, batch: Batch) -> Tensor:
        """Return 2 where a unit is kept and 0 where it is dropped, in the shape of ``like``; ones in evaluation."""
        if self.draws in batch:
            return batch[self.draws]
        if not self.training:
            return torch.ones_like(like)
        # In float32 at every precision, so that a seed always gives the same mask.
        return 2 * (torch.rand(like.shape, device=like.device, dtype=torch.float32) < 0.5).to(like.dtype)


class DrawnDropout(nn.Module):
    """Drops half of the units of each sample at random. ``draws`` names the masks and must differ between layers."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.coins = DropoutMasks(draws)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return ``x`` (batch, units) with half of it dropped and the rest doubled; unchanged in evaluation."""
        return x * self.coins(x, batch).to(x.dtype)


class _WithKeyedDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)
        self.drop_first = KeyedDropout(1)
        self.drop_middle = KeyedDropout(2)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.drop_first(self.first(batch["x"]).tanh(), batch["index"])
        return self.last(self.drop_middle(self.middle(hidden).tanh(), batch["index"]))


class Dropout(Mlp):
    """A three-layer perceptron with two layers of keyed dropout."""

    name = "dropout"
    exposes = "training in evaluation mode, columns of a batch that no longer belong to each other"
    network: ClassVar[type[nn.Module]] = _WithKeyedDropout
    blocks = 5
    narrow = True
    precisions = ("32",)


UNITS = 64
"""Units of a layer. With 64, two samples have the same mask by chance once in 2⁶⁴ pairs."""


class _WithDrawnDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, UNITS), nn.Linear(UNITS, UNITS), nn.Linear(UNITS, 8)
        self.drop_first, self.drop_middle = DrawnDropout("coins 1"), DrawnDropout("coins 2")

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.drop_first(self.first(batch["x"]).tanh(), batch)
        return self.last(self.drop_middle(self.middle(hidden).tanh(), batch))


class RandomMasks(Mlp):
    """A three-layer perceptron with two layers of dropout whose masks are drawn at random."""

    name = "random-masks"
    exposes = "masks that are the same on several ranks, devices, or steps; no masks at all"
    network: ClassVar[type[nn.Module]] = _WithDrawnDropout
    blocks = 5
    narrow = True
    couples_stages = True
    precisions = ("32",)
