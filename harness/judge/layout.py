"""Who computed what in one optimizer step: the shape that turns a backend's contract into arithmetic.

A layout is micro-batches of groups of device shares of sample ids. A *group* is what one loss sees: its devices'
outputs are gathered and the loss is taken over all of them; the step's loss is the mean over groups and over
micro-batches. With it every contract is one formula: none is one group of one device, dp one group of k devices,
ddp one group of one device a rank, ddp2 one group of k devices a node. ℓ(B) is one group of one device that has
all the samples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.core.trace import MicroBatch, Step

Share = tuple[int, ...]
Group = tuple[Share, ...]
Layout = tuple[tuple[Group, ...], ...]


def contract_layout(steps: Sequence[Step], devices_per_process: int) -> Layout:
    """Return what the backend promises for the samples that every rank used in one step (one entry a rank).

    A rank that had fewer micro-batches than another takes no part in those it did not have.
    """
    micro_batches = max(len(step.micro_batches) for step in steps)
    return tuple(
        tuple(
            _group(step.micro_batches[place], devices_per_process) for step in steps if place < len(step.micro_batches)
        )
        for place in range(micro_batches)
    )


def _group(micro_batch: MicroBatch, devices: int) -> Group:
    forwards = tuple(share for share in micro_batch.forwards if share)
    if devices == 1:
        return (tuple(i for share in forwards for i in share),)
    return forwards


def whole(layout: Layout) -> Layout:
    """Return the same samples as one device would take them: one group of one device a micro-batch."""
    return tuple(((tuple(samples((groups,))),),) for groups in layout)


def samples(layout: Layout) -> list[int]:
    """Return every sample id of the step, with repetitions."""
    return [i for groups in layout for group in groups for share in group for i in share]


def shuffled(layout: Layout, rng: random.Random) -> Layout:
    """Return the same layout in another order of summation: samples within a share, and groups, permuted."""
    return tuple(
        tuple(
            tuple(tuple(rng.sample(share, len(share))) for share in group) for group in rng.sample(groups, len(groups))
        )
        for groups in layout
    )
