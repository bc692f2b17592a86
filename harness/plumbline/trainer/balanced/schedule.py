"""When each stage works on which micro-batch: 1F1B, simulated with each stage's seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Box:
    """One forward or backward of one micro-batch on one stage; times in seconds from the start of the step."""

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
        """The share of all stages' time within the makespan in which they wait: 0 to 1."""
        available = self.stages * self.makespan
        return 1 - sum(box.end - box.start for box in self.boxes) / available if available else 0.0

    def period(self, after: Sequence[float]) -> float:
        """Return the seconds from the start of this step to the start of the next one.

        Each stage works for ``after`` seconds between its last backward and the next step's first forward.
        """
        own = [[box for box in self.boxes if box.stage == stage] for stage in range(self.stages)]
        return max(
            max(box.end for box in boxes) + more - min(box.start for box in boxes)
            for boxes, more in zip(own, after, strict=True)
        )


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


def simulate(forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> StageSchedule:
    """Return the schedule of one step, given each stage's seconds for one micro-batch.

    A stage works in the order of 1F1B and starts each piece as soon as its input is there: a forward needs that of the
    stage before, a backward that of the stage after. Transfers take no time.
    """
    stages = len(forward)
    waiting = [iter(one_f_one_b(stage, stages, micro_batches)) for stage in range(stages)]
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
    if kind == FORWARD:
        return ends.get((FORWARD, stage - 1, index)) if stage else 0.0
    return ends.get((BACKWARD, stage + 1, index)) if stage < stages - 1 else ends.get((FORWARD, stage, index))
