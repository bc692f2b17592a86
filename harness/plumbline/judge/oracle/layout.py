"""The layout of one optimizer step: which device computed which samples, and which of these share one loss.

Epochs say how a training is divided into such steps.

A layout is a tuple of micro-batches, each a tuple of groups, each a tuple of device shares, each a tuple of sample ids.
A *group* is what one loss sees: the outputs of its devices are gathered, and the loss is taken over all of them. The
step's loss is the mean over groups and micro-batches. So every contract is one formula: none is one group of one
device, dp one group of k devices, ddp one group of one device per rank, and ddp2 one group of k devices per node. ℓ(B),
the loss of the whole batch, is one group of one device with all samples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plumbline.core.training_behavior import TrainingBehavior
from plumbline.evidence.trace import MicroBatch, Step
from plumbline.workloads import Workload

Share = tuple[int, ...]
Group = tuple[Share, ...]
Layout = tuple[tuple[Group, ...], ...]

_NEXT_DRAW = 2**40
"""Added to a sample's id for each time that the step drew it before; larger than any dataset."""


def with_unique_draws(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return a step of all ranks in which no two draws of a sample have the same id.

    With replacement, a step may draw a sample several times, with other random masks or with another rank's buffers.
    :func:`sample_of` returns the sample's own id.
    """
    times: dict[int, int] = {}

    def drawn(sample: int) -> int:
        times[sample] = times.get(sample, -1) + 1
        return sample + times[sample] * _NEXT_DRAW

    return tuple(
        replace(
            step,
            micro_batches=tuple(
                replace(micro, forwards=tuple(tuple(map(drawn, share)) for share in micro.forwards))
                for micro in step.micro_batches
            ),
        )
        for step in steps
    )


def sample_of(drawn: int) -> int:
    return drawn % _NEXT_DRAW


def contract_layout(steps: Sequence[Step], devices_per_process: int, accumulate: int) -> Layout:
    """Return the layout that the backend promises for the samples of one step; ``steps`` has one entry per rank.

    A rank with fewer micro-batches than others takes no part in the missing ones.
    """
    ranks = [_micro_batches(step.micro_batches, devices_per_process, accumulate) for step in steps]
    return tuple(
        tuple(_group(rank[index], devices_per_process) for rank in ranks if index < len(rank))
        for index in range(max(map(len, ranks)))
    )


def _micro_batches(recorded: Sequence[MicroBatch], devices: int, accumulate: int) -> list[tuple[Share, ...]]:
    """Return the forwards of each of the workload's micro-batches, at most ``accumulate``.

    A subject with one loss per device, or with its own loss function, records more micro-batches than the workload has.
    The contract is the loss over all of them, so they are joined.
    """
    passes = len(recorded)
    if all(micro.loss is None for micro in recorded):
        passes = -(-passes // devices)
    size = -(-len(recorded) // max(min(accumulate, passes), 1))
    return [
        tuple(share for micro in recorded[start : start + size] for share in micro.forwards)
        for start in range(0, len(recorded), max(size, 1))
    ]


def _group(forwards: Sequence[Share], devices: int) -> Group:
    shares = tuple(share for share in forwards if share)
    if devices == 1:
        return (tuple(i for share in shares for i in share),)
    return shares


def one_device_layout(layout: Layout, micro_batches: int = 1) -> Layout:
    """Return the same samples on one device: one group per given number of micro-batches."""
    batches = (layout[start : start + micro_batches] for start in range(0, len(layout), micro_batches))
    return tuple(((tuple(draws(batch)),),) for batch in batches)


def single_batch_layout(layout: Layout) -> Layout:
    """Return the same samples on one device without accumulation: all in one batch."""
    return (((tuple(draws(layout)),),),)


def samples(layout: Layout) -> list[int]:
    return list(map(sample_of, draws(layout)))


def draws(layout: Layout) -> list[int]:
    return [i for groups in layout for group in groups for share in group for i in share]


def shuffled(layout: Layout, rng: random.Random) -> Layout:
    """Return the same layout in another order of summation: samples, shares within a group, and groups, permuted."""
    return tuple(
        tuple(
            tuple(tuple(rng.sample(share, len(share))) for share in rng.sample(group, len(group)))
            for group in rng.sample(groups, len(groups))
        )
        for groups in layout
    )


Position = tuple[int, int]
"""A point between two batches: the number of optimizer steps done, and of micro-batches of the next one."""


@dataclass(frozen=True)
class Epochs:
    """``count`` epochs, each of ``batches``, in windows of ``accumulate``; the last window may be shorter."""

    count: int
    batches: int
    accumulate: int

    @classmethod
    def of(cls, workload: Workload, behavior: TrainingBehavior, devices: int) -> Epochs:
        """Return how a subject divides a workload. A training by iterations is one epoch of whole windows."""
        if behavior.by_iterations:
            return cls(1, workload.steps(devices) * workload.accumulate, workload.accumulate)
        return cls(workload.epochs, workload.steps_per_epoch, workload.accumulate)

    @property
    def windows(self) -> int:
        return -(-self.batches // self.accumulate)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many micro-batches each optimizer step of the training has."""
        whole, rest = divmod(self.batches, self.accumulate)
        return ((self.accumulate,) * whole + ((rest,) if rest else ())) * self.count

    def after_batch(self, epoch: int, batches: int) -> tuple[Position, ...]:
        """Return the position after ``batches`` of an epoch; at a window's end, both after and before its step."""
        whole, rest = divmod(batches, self.accumulate)
        first = epoch * self.windows
        if rest and batches < self.batches:
            return ((first + whole, rest),)
        done = -(-batches // self.accumulate)
        return (first + done, 0), (first + done - 1, rest or self.accumulate)
