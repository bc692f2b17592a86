"""The optimal partition of a chain of blocks into stages, by dynamic programming with a memory limit per device.

Let t be a stage's seconds for one micro-batch. If all stages are equal, a step of m micro-batches takes
Σt + (m − 1) · max t. Σt is the same for every partition, so the best partition minimises max t and, among equals, the
largest peak memory. t includes 1/m of the seconds that the stage's optimizers take per step, because a stage must
complete both before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from plumbline.trainer.balanced.stage_plan import Profile, Stage, Travelling
from plumbline.trainer.errors import MisconfigurationError

INFINITE = float("inf")


class DoesNotFitError(MisconfigurationError):
    """The devices do not have enough memory."""


class StageCosts:
    """The costs of consecutive blocks ``first`` to ``last - 1`` on one device."""

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

        This is the sum of its state, the working memory of one micro-batch, the activations of the other micro-batches
        in flight, and a gradient that the previous stage has not received yet.
        """
        others = min(self.stages - stage, self.micro_batches) - 1
        place = last - first
        sent = self._arriving[first] if self.micro_batches > others + 1 else 0
        return self._state[first][place] + others * self._activations[first][place] + self._working[first][place] + sent


def partition(
    profile: Profile, stages: int, micro_batches: int, memory: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Return the stages that minimise the time of the slowest stage and, among equals, the largest peak memory.

    This takes O(n² · stages) time for n blocks. ``micro_batches`` are those of one pipeline in a step. ``memory`` has
    the maximum bytes of each stage's device. None: no limit.
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
    assert lightest is not None  # ``found`` satisfies the conditions
    return lightest


def _least_maximum(
    blocks: int, stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, tuple[Stage, ...] | None]:
    """Return the minimum over partitions of a partition's largest ``cost(first, last, stage)``, and such a partition.

    The partition is None if every partition has a stage of infinite cost.
    """
    # best[last]: the minimum for partitions of the first `last` blocks into the stages so far
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
        # The stages that can have this block and leave a block for each stage before and after.
        places = range(max(0, stages - (blocks - block)), min(stages, block + 1))
        needs = {stage: costs.peak_bytes(block, block + 1, stage) for stage in places}
        if all(needed > memory[stage] for stage, needed in needs.items()):
            stage = min(needs, key=lambda place: needs[place] - memory[place])
            return (
                f"Block {block} ({costs.names[block]}) does not fit on any device: on device {stage} it needs "
                f"{needs[stage]:,} bytes alone, and {memory[stage]:,} are allowed. {advice}"
            )
    starts = {0}  # blocks with which the stage can begin if all earlier blocks are on earlier stages
    for stage in range(stages):
        enough = blocks - (stages - stage - 1)  # each stage after this one needs a block
        ends = {
            (last, first)
            for first in starts
            for last in range(first + 1, enough + 1)
            if costs.peak_bytes(first, last, stage) <= memory[stage]
        }
        # The block that is left over: the one after the furthest end, or the stage's first if no block fits on it.
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
    """Return, for each first block, the sums of ``costs`` over the 0, 1, … blocks from it on.

    ``shared`` has costs that are part of the costs of several blocks, each with these blocks. A sum counts them once.
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
    """Return, for each first block, the bytes of a micro-batch that the 0, 1, … blocks from it on keep for backward.

    These are the tensors that the blocks save and, with ``returned``, the outputs of the last block.
    """
    own = [block.saved_bytes for block in profile.blocks]
    for tensor in profile.travelling:
        for block in tensor.keepers:
            own[block] -= tensor.bytes
    sums = []
    for first in range(len(own)):
        kept = list(accumulate(own[first:], initial=0))
        for tensor in profile.travelling:
            keeper = _keeper(tensor, first)  # ranges with this block count the tensor in any case
            for last in range(first + 1, len(own) + 1):
                if keeper < last or (returned and last - 1 in tensor.leaves):
                    kept[last - first] += tensor.bytes
        sums.append(kept)
    return sums


def _keeper(tensor: Travelling, first: int) -> float:
    return min((block for block in tensor.keepers if block >= first), default=INFINITE)


def _working(profile: Profile, activations: list[list[int]]) -> list[list[int]]:
    """Return, for each first block, the peak bytes of the micro-batch that passes through 0, 1, … blocks from it on.

    While the first block runs, its inputs are alive. While the last block runs, everything that the blocks keep is
    alive, and the block's temporary memory. While another block runs backward, everything that it and earlier blocks
    keep is alive, but of later blocks only the outputs of the last one, and their gradients.
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
                # While blocks before ``end`` run backward, these are alive only because the last block returned them.
                more = sum(one.bytes for one in returned if _keeper(one, first) >= end)
                after = max(after, backward[end - first] + more + block.output_bytes)
            alive.append(max(forward, held + block.transient_bytes, after))
            forward, backward = max(forward, held), [*backward, max(backward[-1], own + block.transient_bytes)]
        sums.append(alive)
    return sums
