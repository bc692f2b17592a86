"""What a model's layers drew at random, as fair coins, and how surprised one should be at them.

A layer that drops half of its units tosses a coin for each unit of each sample. A *row* is one sample's coins of one
layer; a *stream* is all coins of one device of one rank, in the order in which they were tossed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.evidence.trace import Trace
from harness.judge.oracle.noise import FALSE_ALARM


@dataclass(frozen=True)
class MaskPosition:
    """Where a row was tossed; ``position`` counts the samples of one forward of one device."""

    rank: int
    step: int
    micro_batch: int
    device: int
    layer: str
    position: int

    def __str__(self) -> str:
        words = f"rank {self.rank}, step {self.step}, sample {self.position} of {self.layer!r}"
        return f"{words} on device {self.device}" if self.device else words


@dataclass(frozen=True)
class SampleMask:
    """One sample's coins of one layer: True where a unit is kept."""

    place: MaskPosition
    coins: Tensor


def rows(trace: Trace, layers: Sequence[str]) -> Iterator[SampleMask]:
    """Yield every row of every rank, in the order of tossing; ``layers`` are asked in the order of their names."""
    for rank in trace.ranks:
        for index, step in enumerate(rank.steps):
            for number, micro in enumerate(step.micro_batches):
                start = 0
                for device, share in enumerate(micro.forwards):
                    for layer in sorted(layers):
                        for position, coins in enumerate(micro.drawn[layer][start : start + len(share)]):
                            yield SampleMask(
                                MaskPosition(rank.rank, index, number, device, layer, position), coins.flatten() != 0
                            )
                    start += len(share)


def surprise(count: Tensor, tosses: Tensor) -> Tensor:
    """Return minus the logarithm of (a bound on) the chance of so uneven a count among so many tosses of a fair coin.

    Chernoff's bound for one side, P ≤ exp(-n · KL(k/n ‖ 1/2)); it is exact where all tosses are alike. Counts of
    agreements between two independent rows of coins are such counts too.
    """
    share = count / tosses
    relative_entropy: Tensor = math.log(2) + torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)
    return tosses * relative_entropy


def surprise_limit(questions: int) -> float:
    """Return the surprise that a right trainer exceeds, in any of so many counts and on either side, by FALSE_ALARM."""
    return math.log(2 * max(questions, 1) / FALSE_ALARM)


def agreements(tosses: Tensor) -> Tensor:
    """Return for each two rows of a table of coins how many they have in common."""
    signs = 2 * tosses.double() - 1
    return (tosses.shape[1] + signs @ signs.T) / 2


def shifted_agreements(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each lag how many coins two streams have in common, in how many places, and the lags.

    At a lag each coin of ``right`` stands beside the one that ``left`` tosses so many coins later.
    """
    size = len(left) + len(right)
    signs = [torch.fft.rfft(2 * stream.double() - 1, size) for stream in (left, right)]
    products = torch.fft.irfft(signs[0] * signs[1].conj(), size).round()
    lags = torch.arange(1 - len(right), len(left))
    places = torch.minimum(torch.tensor(len(left)), lags + len(right)) - lags.clamp(min=0)
    return (places + products[lags % size]) / 2, places.double(), lags
