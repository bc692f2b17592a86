"""Dropout whose masks follow from the sample: one device and many drop the same units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BITS = 32


class KeyedDropout(nn.Module):
    """Drops half of the units of each sample; which ones follows from the sample's id, ``layer`` and the unit.

    Args:
        layer: another number for each layer of a model.
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

    The constant is C. Wellons', https://github.com/skeeto/hash-prospector: no product leaves an int64.
    """
    for _ in range(2):
        key = ((key ^ (key >> 16)) * 0x45D9F3B) & (2**BITS - 1)
    return key ^ (key >> 16)
