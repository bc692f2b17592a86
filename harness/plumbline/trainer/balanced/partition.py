"""The exact partition of a chain of blocks into stages, by dynamic programming under each device's memory limit.

With per-stage seconds t of one micro-batch, a step of m micro-batches takes Σt + (m − 1) · max t where all stages are
alike, and the partition that makes this least is the one asked for. Σt is the same for every partition, so the least
largest t is what is found; among those, the least largest peak memory. To t belongs 1/m of the seconds that a stage's
optimizers take once a step: a stage has to do its share of both before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from plumbline.trainer.balanced.stage_plan import Profile, Stage, Travelling
from plumbline.trainer.errors import MisconfigurationError

INFINITE = float("inf")


class DoesNotFitError(MisconfigurationError):
    """The devices' memory does not suffice."""


class StageCosts:
    """What consecutive blocks cost on one device, for each range of blocks ``first`` to ``last - 1``."""

    def __init__(self, profile: Profile, stages: int, micro_batches: int) -> None:
        self.names = [block.name for block in profile.blocks]
        self.stages, self.micro_batches = stages, micro_batches
        self._seconds = _once([block.seconds for block in profile.blocks], [])
        self._optimizer = _once(
            [block.optimizer_seconds for block in profile.blocks],
            [(tie.blocks, tie.optimizer_seconds) for tie in profile.ties],
        )
        self._state = _once(
            [block.state_bytes for block in profile.blocks], [(tie.blocks, tie.bytes) for tie in profile.ties]
        )
        self._activations = _activations(profile, returned=True)
        self._working = _working(profile, self._activations)
        self._arriving = [0, *(block.output_bytes for block in profile.blocks)]

    def seconds(self, first: int, last: int) -> float:
        return self._seconds[first][last - first]

    def optimizer_seconds(self, first: int, last: int) -> float:
        return self._optimizer[first][last - first]

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        """Return the peak memory of stage number ``stage``.

        It is the sum of its state, the activations of the micro-batches in flight, the working memory of one of them,
        and the gradient that the previous stage has not received yet.
        """
        others = min(self.stages - stage, self.micro_batches) - 1
        place = last - first
        sent = self._arriving[first] if self.micro_batches > others + 1 else 0
        return self._state[first][place] + others * self._activations[first][place] + self._working[first][place] + sent


def partition(
    profile: Profile, stages: int, micro_batches: int, memory: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Return the stages whose slowest is fastest; among those, whose largest peak memory is least.

    Takes O(n² · stages) for n blocks. ``profile`` was measured with as many ``micro_batches``. ``memory`` has the bytes
    that the device of each stage may hold, None without a limit.
    """
    blocks = len(profile.blocks)
    if stages > blocks:
        raise MisconfigurationError(
            f"{blocks} blocks cannot be distributed over {stages} devices: use at most {blocks} devices, or a model of "
            "more blocks."
        )
    costs = StageCosts(profile, stages, micro_batches)

    def share(first: int, last: int) -> float:
        return costs.seconds(first, last) + costs.optimizer_seconds(first, last) / micro_batches

    def fits(first: int, last: int, stage: int) -> bool:
        return memory is None or costs.peak_bytes(first, last, stage) <= memory[stage]

    def seconds(first: int, last: int, stage: int) -> float:
        return share(first, last) if fits(first, last, stage) else INFINITE

    slowest, found = _least_maximum(blocks, stages, seconds)
    if found is None:
        assert memory is not None  # without a limit everything fits
        raise DoesNotFitError(_what_does_not_fit(costs, memory))

    def peak_bytes(first: int, last: int, stage: int) -> float:
        peak = costs.peak_bytes(first, last, stage)
        return peak if share(first, last) <= slowest and fits(first, last, stage) else INFINITE

    _, lightest = _least_maximum(blocks, stages, peak_bytes)
    assert lightest is not None  # the partition that was found is one
    return lightest


def _least_maximum(
    blocks: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, tuple[Stage, ...] | None]:
    """Return the least largest ``cost(first, last, stage)`` over a partition's stages, and a partition with it.

    None stands for the partition if each has a stage of infinite cost.
    """
    # best[last]: of the partitions of the first `last` blocks into the stages so far
    best = [0.0] + [INFINITE] * blocks
    cuts: list[list[int]] = []
    for stage in range(stages):
        reached, came_from = [INFINITE] * (blocks + 1), [-1] * (blocks + 1)
        for last in range(stage + 1, blocks + 1):
            for first in range(stage, last):
                if best[first] < reached[last]:
                    largest = max(best[first], cost(first, last, stage))
                    if largest < reached[last]:
                        reached[last], came_from[last] = largest, first
        best = reached
        cuts.append(came_from)
    if best[blocks] == INFINITE:
        return INFINITE, None
    bounds = [blocks]
    for came_from in reversed(cuts):
        bounds.append(came_from[bounds[-1]])
    bounds.reverse()
    return best[blocks], tuple(Stage(first, last) for first, last in pairwise(bounds))


def _what_does_not_fit(costs: StageCosts, memory: Sequence[int]) -> str:
    blocks, stages = len(costs.names), len(memory)
    advice = "Use more devices or memory, or a smaller batch."
    for block in range(blocks):
        # It has to be on one of the stages that leave a block for each stage before and after it.
        places = range(max(0, stages - (blocks - block)), min(stages, block + 1))
        needs = {stage: costs.peak_bytes(block, block + 1, stage) for stage in places}
        if all(needed > memory[stage] for stage, needed in needs.items()):
            stage = min(needs, key=lambda place: needs[place] - memory[place])
            return (
                f"Block {block} ({costs.names[block]}) does not fit on any device: on device {stage} it needs "
                f"{needs[stage]:,} bytes alone, and {memory[stage]:,} are allowed. {advice}"
            )
    starts = {0}  # blocks with which the stage may begin, all before them being placed
    for stage in range(stages):
        enough = blocks - (stages - stage - 1)  # each stage after this one needs a block
        ends = {
            (last, first)
            for first in starts
            for last in range(first + 1, enough + 1)
            if costs.peak_bytes(first, last, stage) <= memory[stage]
        }
        # With nothing placed the block with which the stage begins is left over, else the one after the furthest.
        left, first = max(ends, default=(max(starts), max(starts)))
        starts = {last for last, _ in ends}
        if not starts:
            break
    needed = costs.peak_bytes(first, left + 1, stage)
    return (
        f"Block {left} ({costs.names[left]}) does not fit: with as many blocks as possible on the devices before, "
        f"device {stage} needs {needed:,} bytes up to it, and {memory[stage]:,} are allowed. {advice}"
    )


Cost = TypeVar("Cost", int, float)


def _once(costs: Sequence[Cost], shared: Sequence[tuple[tuple[int, ...], Cost]]) -> list[list[Cost]]:
    """Return for each first block the sums over 0, 1, … blocks from it on.

    What is ``shared``, blocks and what each of them counts for it, counts once.
    """
    sums = []
    for first in range(len(costs)):
        new = list(costs[first:])
        for blocks, cost in shared:
            held = [block for block in blocks if block >= first]
            for block in held[1:]:
                new[block - first] -= cost
        sums.append(list(accumulate(new, initial=0)))
    return sums


def _activations(profile: Profile, *, returned: bool) -> list[list[int]]:
    """Return for each first block what 0, 1, … blocks from it on keep of a micro-batch between forward and backward.

    That is what the blocks save and, with ``returned``, what the last of them returned.
    """
    own = [block.saved_bytes for block in profile.blocks]
    for tensor in profile.travelling:
        for block in tensor.keepers:
            own[block] -= tensor.bytes
    sums = []
    for first in range(len(own)):
        kept = list(accumulate(own[first:], initial=0))
        for tensor in profile.travelling:
            keeper = _keeper(tensor, first)  # from there on it is there in any case
            for last in range(first + 1, len(own) + 1):
                if keeper < last or (returned and last - 1 in tensor.leaves):
                    kept[last - first] += tensor.bytes
        sums.append(kept)
    return sums


def _keeper(tensor: Travelling, first: int) -> float:
    return min((block for block in tensor.keepers if block >= first), default=INFINITE)


def _working(profile: Profile, activations: list[list[int]]) -> list[list[int]]:
    """Return for each first block what is alive at most of the micro-batch that passes through 0, 1, … blocks.

    While the first block runs, what arrived is alive. While the last block runs that is all they keep, and what the
    block needs meanwhile. While another one runs backward, the blocks before it have all of theirs, those after it
    nothing but what the last one returned, and its gradient.
    """
    sums = []
    for first, (kept, saved) in enumerate(zip(activations, _activations(profile, returned=False), strict=True)):
        arrived = sum(
            one.bytes
            for one in profile.travelling
            if first in one.enters and first not in one.keepers and first not in one.leaves
        )
        alive, forward, backward = [0], kept[1] + arrived, [0]
        for last, block in enumerate(profile.blocks[first:], start=first + 1):
            held, own = kept[last - first], saved[last - first]
            returned = [one for one in profile.travelling if last - 1 in one.leaves]
            keepers = {_keeper(one, first) for one in returned}
            after = 0
            for end in {last - 1, *(int(keeper) for keeper in keepers if keeper < last)} - {first}:
                # While a block before ``end`` runs backward, these are there only because they were returned.
                more = sum(one.bytes for one in returned if _keeper(one, first) >= end)
                after = max(after, backward[end - first] + more + block.output_bytes)
            alive.append(max(forward, held + block.transient_bytes, after))
            forward, backward = max(forward, held), [*backward, max(backward[-1], own + block.transient_bytes)]
        sums.append(alive)
    return sums
