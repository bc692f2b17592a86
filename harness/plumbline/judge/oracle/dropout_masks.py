"""Random masks drawn by a model's layers, and the probability that independent fair masks are that similar.

A layer that drops half of its units draws one bit for each unit of each sample. A *mask* is one sample's bits in one
layer; a *stream* is all bits of one device of one rank, in drawing order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plumbline.evidence.trace import Trace
from plumbline.judge.oracle.noise import FALSE_ALARM
from plumbline.workloads import Workload


@dataclass(frozen=True)
class MaskPosition:
    """Where a mask was drawn; ``position`` counts the samples of one forward of one device."""

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
    """One sample's bits in one layer: True where a unit is kept."""

    place: MaskPosition
    bits: Tensor


def mask_shapes(workload: Workload, devices: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the mask that each drawing layer of a whole model draws for one sample, by its name."""
    model, shapes = workload.model(torch.float64), {}

    def note(layer: nn.Module, args: object, drawn: Tensor) -> None:
        shapes[str(layer.draws)] = tuple(drawn.shape[1:])

    for layer in model.modules():
        if getattr(layer, "draws", None):
            layer.register_forward_hook(note)
    with torch.no_grad():
        model(workload.dataset(devices, torch.float64).batch([0, 1]))
    return shapes


def masks_of(trace: Trace, layers: Sequence[str]) -> Iterator[SampleMask]:
    """Yield every mask of every rank in drawing order; ``layers`` draw in the order of their names."""
    for rank in trace.ranks:
        for index, step in enumerate(rank.steps):
            for number, micro in enumerate(step.micro_batches):
                start = 0
                for device, share in enumerate(micro.forwards):
                    for layer in sorted(layers):
                        for position, bits in enumerate(micro.drawn[layer][start : start + len(share)]):
                            yield SampleMask(
                                MaskPosition(rank.rank, index, number, device, layer, position), bits.flatten() != 0
                            )
                    start += len(share)


def surprise(count: Tensor, size: Tensor) -> Tensor:
    """Return minus the logarithm of (a bound on) the probability that ``size`` fair bits have so uneven a ``count``.

    Chernoff's bound for one side, P ≤ exp(-n · KL(k/n ‖ 1/2)), is exact if all bits are alike. It also holds for the
    number of bits in which two independent masks agree.
    """
    share = count / size
    relative_entropy: Tensor = math.log(2) + torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)
    return size * relative_entropy


def surprise_limit(counts: int) -> float:
    """Return the surprise that a correct trainer exceeds in any of ``counts`` with probability FALSE_ALARM."""
    return math.log(2 * max(counts, 1) / FALSE_ALARM)


def agreements(masks: Tensor) -> Tensor:
    """Return for each pair of rows in a table of masks how many bits agree."""
    signs = 2 * masks.double() - 1
    return (masks.shape[1] + signs @ signs.T) / 2


def shifted_agreements(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each lag how many bits of two streams agree, in how many places, and the lags.

    A lag of n compares each bit of ``right`` with the bit that ``left`` draws n bits later.
    """
    size = len(left) + len(right)
    signs = [torch.fft.rfft(2 * stream.double() - 1, size) for stream in (left, right)]
    products = torch.fft.irfft(signs[0] * signs[1].conj(), size).round()
    lags = torch.arange(1 - len(right), len(left))
    places = torch.minimum(torch.tensor(len(left)), lags + len(right)) - lags.clamp(min=0)
    return (places + products[lags % size]) / 2, places.double(), lags
