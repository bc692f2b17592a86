"""Dropout whose masks are drawn from torch's own generator, and can be taken down and handed back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.workloads.base import Batch


class DropoutMasks(nn.Module):
    """Tosses a fair coin for each unit of each sample: what a dropout layer that keeps half of its units draws.

    A forward hook sees what was drawn. Where the batch has a column called ``draws``, nothing is drawn: it is taken
    for the coins, a row a sample.
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
        # In float32 whatever the precision, so that one seed gives one mask.
        return 2 * (torch.rand(like.shape, device=like.device, dtype=torch.float32) < 0.5).to(like.dtype)


class DrawnDropout(nn.Module):
    """Drops half of the units of each sample, at random; ``draws`` names the coins, another name for each layer."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.coins = DropoutMasks(draws)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return ``x`` (batch, units) with half of it dropped and the rest doubled; unchanged in evaluation."""
        return x * self.coins(x, batch).to(x.dtype)
