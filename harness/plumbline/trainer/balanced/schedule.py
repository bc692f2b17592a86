"""When each stage works on which micro-batch: 1F1B and GPipe, simulated with each stage's seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True)
class Box:
    """One forward or backward of one micro-batch on one stage; times in seconds from the begin of the step."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageSchedule:
    """A step as it passes through the stages."""

    boxes: tuple[Box, ...]
    stages: int

    @property
    def makespan(self) -> float:
        """Seconds from the first forward's start to the last backward's end."""
        return max(box.end for box in self.boxes)

    @property
    def bubble_share(self) -> float:
        """The part of all stages' time within the makespan in which they wait: 0 to 1."""
        available = self.stages * self.makespan
        return 1 - sum(box.end - box.start for box in self.boxes) / available if available else 0.0

    def period(self, after: Sequence[float]) -> float:
        """Return the seconds from this step's begin to the next one's.

        Each stage has ``after`` seconds of work between its last backward and the next step's first forward.
        """
        own = [[box for box in self.boxes if box.stage == stage] for stage in range(self.stages)]
        return max(
            max(box.end for box in boxes) + more - min(box.start for box in boxes)
            for boxes, more in zip(own, after, strict=True)
        )

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches that the stage keeps for backward at one time."""
        held = most = 0
        for box in sorted((box for box in self.boxes if box.stage == stage), key=lambda box: box.start):
            held += 1 if box.kind == FORWARD else -1
            most = max(most, held)
        return most


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return a stage's order of work: forwards until the pipeline is full, then one backward after each forward.

    At most ``min(stages - stage, micro_batches)`` micro-batches are in flight (Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training", 2021: PipeDream-Flush; it is torch's ``Schedule1F1B``).
    """
    ahead = min(stages - stage - 1, micro_batches)
    order = [(FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        order += [(FORWARD, ahead + index), (BACKWARD, index)]
    return order + [(BACKWARD, index) for index in range(micro_batches - ahead, micro_batches)]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return a stage's order of work: all forwards, then all backwards (Huang et al., "GPipe", 2019)."""
    return [(kind, index) for kind in (FORWARD, BACKWARD) for index in range(micro_batches)]


ORDERS = {"1f1b": one_f_one_b, "gpipe": gpipe}


def simulate(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, order: str = "1f1b"
) -> StageSchedule:
    """Return the schedule of one step.

    A stage does its work in its order, each piece as soon as what it needs is there: a forward needs that of the stage
    before, a backward that of the stage after. Transfers take no time.

    Args:
        forward: Seconds of one micro-batch on each stage.
        backward: As long as ``forward``.
        micro_batches: At least one.
        order: ``"1f1b"`` or ``"gpipe"``.

    """
    stages = len(forward)
    waiting = [iter(ORDERS[order](stage, stages, micro_batches)) for stage in range(stages)]
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    boxes: list[Box] = []
    upcoming = [next(work, None) for work in waiting]
    while any(upcoming):
        for stage, work in enumerate(upcoming):
            while work is not None:
                kind, index = work
                ready = _ready(ends, kind, stage, index, stages)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + (forward[stage] if kind == FORWARD else backward[stage])
                ends[kind, stage, index] = free[stage]
                boxes.append(Box(stage, kind, index, start, free[stage]))
                work = next(waiting[stage], None)
            upcoming[stage] = work
    return StageSchedule(tuple(boxes), stages)


def _ready(ends: dict[tuple[str, int, int], float], kind: str, stage: int, index: int, stages: int) -> float | None:
    """Return when the input of this piece of work is there; None: that is not known yet."""
    if kind == FORWARD:
        return ends.get((FORWARD, stage - 1, index)) if stage else 0.0
    return ends.get((BACKWARD, stage + 1, index)) if stage < stages - 1 else ends.get((FORWARD, stage, index))
