"""Plans: the costs of blocks, the blocks of each device, and a simulated step, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from plumbline.drawing import Box as DrawnBox
from plumbline.drawing import duration, timeline

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Box:
    """One forward or backward of one micro-batch on one stage. Times are in seconds from the start of the step."""

    stage: int
    kind: str  # FORWARD or BACKWARD
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageSchedule:
    """The schedule of one step on all stages."""

    boxes: tuple[Box, ...]
    stages: int

    @property
    def makespan(self) -> float:
        """Seconds from the first forward's start to the last backward's end."""
        return max(box.end for box in self.boxes)

    @property
    def bubble_share(self) -> float:
        """The share of the stages' total time within the makespan that they spend waiting, 0 to 1."""
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
    Pipeline-Parallel DNN Training", 2021: PipeDream-Flush; torch has it as ``Schedule1F1B``).
    """
    ahead = min(stages - stage - 1, micro_batches)
    order = [(FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        order += [(FORWARD, ahead + index), (BACKWARD, index)]
    return order + [(BACKWARD, index) for index in range(micro_batches - ahead, micro_batches)]


def simulate(forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> StageSchedule:
    """Return the schedule of one step, given each stage's seconds for one micro-batch.

    A stage works in 1F1B order and starts each forward and backward as soon as its input is ready: a forward needs the
    previous stage's forward, a backward the next stage's backward. Transfers take no time.
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


@dataclass(frozen=True)
class BlockCost:
    """The costs of one block, measured with micro-batches of one size."""

    name: str  # the qualified name in the user's module; several names are joined by " + "
    seconds: float  # forward + backward of one micro-batch, median
    saved_bytes: int  # saved for the backward of one micro-batch, without parameters and the batch itself
    state_bytes: int  # parameters + gradients + optimizer state + buffers
    output_bytes: int  # sent to the next block, for one micro-batch
    forward_share: float = 1 / 3  # of the seconds; a matrix product has one product forward and two backward
    transient_bytes: int = 0  # peak within forward and backward, minus the bytes that are allocated between them
    optimizer_seconds: float = 0.0  # of the optimizers' step, once per batch


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that several blocks use. A device with several of these blocks stores and steps it once."""

    name: str
    blocks: tuple[int, ...]  # ascending
    bytes: int
    optimizer_seconds: float = 0.0


@dataclass
class Travelling:
    """A storage that passes between blocks.

    A device holds it if its first block receives it, its last block returns it, or one of its blocks keeps it.
    """

    bytes: int
    keepers: list[int] = field(default_factory=list)  # blocks that save it for backward; it is in their saved_bytes
    enters: list[int] = field(default_factory=list)  # blocks that receive it
    leaves: list[int] = field(default_factory=list)  # blocks that return it


@dataclass(frozen=True)
class Profile:
    """All blocks in order, measured with micro-batches of one size."""

    blocks: tuple[BlockCost, ...]
    ties: tuple[Shared, ...] = ()  # parameters and buffers of several blocks, included in their state_bytes
    travelling: tuple[Travelling, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on one device: ``first`` to ``last - 1``."""

    first: int
    last: int


@dataclass(frozen=True)
class Prediction:
    """The predicted or measured seconds and bytes of a step of the plan."""

    step_seconds: float  # all forwards and backwards of one step, without the optimizer
    stage_seconds: tuple[float, ...]  # forward + backward of one micro-batch
    stage_peak_bytes: tuple[int, ...]
    bubble_share: float  # the share of the devices' time within a step that they spend waiting, 0 to 1
    optimizer_seconds: tuple[float, ...] = ()  # of each stage's optimizers, once per step
    period_seconds: float = 0.0  # from the start of a step to the start of the next one, including the optimizers


WIDTH = 100
NAMES = 2  # index of the column with the names of blocks
HEADERS = ("stage", "blocks", "time", "of slowest", "peak memory")


@dataclass(frozen=True)
class StagePlan:
    """The blocks of each stage, and the number of micro-batches of a batch."""

    blocks: tuple[BlockCost, ...]
    stages: tuple[Stage, ...]
    micro_batches: int  # of a batch, over all replicas
    predicted: Prediction
    memory: tuple[int, ...] | None = None  # maximum bytes of each stage's device; None: no limit
    ties: tuple[Shared, ...] = ()
    replicas: int = 1  # number of replicas of each stage, which share the micro-batches of a batch

    def stage_name(self, number: int) -> str:
        names = [block.name for block in self.blocks[self.stages[number].first : self.stages[number].last]]
        return f"Stage {number} ({names[0]}{f' to {names[-1]}' if len(names) > 1 else ''})"

    def schedule(self) -> StageSchedule:
        """Return the simulated step: 1F1B with each stage's predicted times."""
        held = [self.blocks[stage.first : stage.last] for stage in self.stages]
        forward = [sum(block.seconds * block.forward_share for block in blocks) for blocks in held]
        both = [sum(block.seconds for block in blocks) for blocks in held]
        return simulate(
            forward, [b - f for b, f in zip(both, forward, strict=True)], self.micro_batches // self.replicas
        )

    def table(self, measured: Prediction | None = None) -> str:
        """Return a headline and a line for each stage, at most 100 columns wide. ``measured`` adds columns."""
        predicted = self.predicted
        slowest = max(predicted.stage_seconds) or 1.0
        headers = list(HEADERS)
        if self.memory is not None:
            headers.append("allowed")
        if measured is not None:
            headers += ["measured", "peak"] if measured.stage_peak_bytes else ["measured"]
        rows = []
        for number, stage in enumerate(self.stages):
            seconds = predicted.stage_seconds[number]
            row = [
                str(number),
                str(stage.last - stage.first),
                duration(seconds),
                f"{seconds / slowest:.0%}",
                size(predicted.stage_peak_bytes[number]),
            ]
            if self.memory is not None:
                row.append(size(self.memory[number]))
            if measured is not None:
                row.append(duration(measured.stage_seconds[number]))
                row += map(size, measured.stage_peak_bytes[number : number + 1])
            rows.append(row)
        # The names of blocks get the width that the other columns leave.
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        room = WIDTH - sum(widths) - 2 * len(widths)
        names = [_span([block.name for block in self.blocks[stage.first : stage.last]], room) for stage in self.stages]
        headers.insert(2, "")
        widths.insert(2, max(map(len, names)))
        for row, name in zip(rows, names, strict=True):
            row.insert(2, name)
        lines = [self._headline(measured), "", _line(headers, widths), *(_line(row, widths) for row in rows)]
        return "\n".join(lines) + "\n"

    def picture(self) -> str:
        labels = [
            f"stage {number}: {_count(stage.last - stage.first, 'block')}, {size(peak)}"
            for number, (stage, peak) in enumerate(zip(self.stages, self.predicted.stage_peak_bytes, strict=True))
        ]
        boxes = [
            DrawnBox(box.stage, box.kind, str(box.micro_batch), box.start, box.end) for box in self.schedule().boxes
        ]
        return timeline(self._headline(), labels, boxes)

    def _headline(self, measured: Prediction | None = None) -> str:
        predicted = self.predicted
        replicas = "" if self.replicas == 1 else f"{_count(self.replicas, 'replica')} of "
        line = (
            f"{replicas}{_count(len(self.stages), 'stage')}, {_count(self.micro_batches, 'micro-batch', 'es')}: "
            f"{duration(predicted.step_seconds)} a step, {predicted.bubble_share:.0%} bubble"
        )
        if measured is not None:
            line += f"; measured {duration(measured.step_seconds)}, {measured.bubble_share:.0%} bubble"
        return line


@dataclass(frozen=True)
class Balance:
    """The plan of a training and its measurements. ``str()`` returns a table of the stages."""

    plan: StagePlan
    measured: Prediction | None = None

    def __str__(self) -> str:
        return self.plan.table(self.measured)

    def with_measured(self, reports: Sequence[tuple[float, float, int]]) -> Balance:
        """Return the plan with all ranks' measurements: the seconds of ``StageClock.report``, and peak bytes."""
        stages = len(self.plan.stages)
        of_stages = [reports[stage::stages] for stage in range(stages)]  # the reports of each stage's replicas
        busy = tuple(fmean(seconds for seconds, _, _ in replicas) for replicas in of_stages)
        step = max(seconds for _, seconds, _ in reports)
        if not step:
            return self
        peaks = tuple(max(peak for _, _, peak in replicas) for replicas in of_stages)
        bubble = 1 - self.plan.micro_batches // self.plan.replicas * sum(busy) / (stages * step)
        return Balance(self.plan, Prediction(step, busy, peaks, max(0.0, bubble)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Balance:
        plan, measured = values["plan"], values["measured"]
        parts = {"blocks": BlockCost, "stages": Stage, "ties": Shared}
        nested = {name: tuple(kind(**value) for value in plan[name]) for name, kind in parts.items()}
        whole = StagePlan(**{**plan, **nested, "predicted": Prediction(**plan["predicted"])})
        return cls(whole, None if measured is None else Prediction(**measured))


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def size(number: int) -> str:
    """Format a number of bytes with three digits and a unit. 1 MB is 10⁶ bytes."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 999.5 * scale else f"{number / scale:.0f} {unit}"
    return f"{number} B"


def _span(names: Sequence[str], room: int) -> str:
    if len(names) == 1 or names[0] == names[-1]:
        return _shortened(names[0], room)
    each = (room - 3) // 2
    return f"{_shortened(names[0], each)} … {_shortened(names[-1], each)}"


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    head = max(0, room - 1) // 2
    tail = max(0, room - 1 - head)
    return f"{name[:head]}…{name[len(name) - tail :]}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if index == NAMES else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
