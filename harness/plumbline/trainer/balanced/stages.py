"""The values that planning and running exchange: what a block costs, which blocks a device holds, what is expected."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.trainer.balanced import picture, table
from plumbline.trainer.balanced.schedule import StageSchedule, simulate


@dataclass(frozen=True)
class BlockCost:
    """One block, profiled with micro-batches of one size."""

    name: str  # the qualified name in the user's module; names joined by " + " where a block holds several
    seconds: float  # forward + backward of one micro-batch, median
    saved_bytes: int  # kept for the backward of one micro-batch, without parameters and the batch itself
    state_bytes: int  # parameters + gradients + optimizer state + buffers
    output_bytes: int  # what travels to the next block, for one micro-batch
    forward_share: float = 1 / 3  # of the seconds; a matrix product has one product forward and two backward
    transient_bytes: int = 0  # allocated within forward or backward, beyond what is there between them
    optimizer_seconds: float = 0.0  # of the optimizers' step, once a batch


@dataclass(frozen=True)
class Shared:
    """What several blocks count, and a device which holds several of these blocks has once: bytes, and their step."""

    name: str
    blocks: tuple[int, ...]  # ascending
    bytes: int
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class Travelling:
    """A tensor that leaves a block: a device has it if it begins, or ends, where the tensor travels, or keeps it."""

    bytes: int
    keepers: tuple[int, ...]  # blocks that keep it for backward: it is within their saved_bytes
    enters: tuple[int, ...]  # blocks that are given it
    leaves: tuple[int, ...]  # blocks that return it


@dataclass(frozen=True)
class Profile:
    """All blocks in order, measured with micro-batches of one size."""

    blocks: tuple[BlockCost, ...]
    ties: tuple[Shared, ...] = ()  # parameters and buffers of several blocks, within their state_bytes
    travelling: tuple[Travelling, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on one device: ``first`` to ``last - 1``."""

    first: int
    last: int


@dataclass(frozen=True)
class Prediction:
    """What a step of the plan is expected to take."""

    step_seconds: float  # all forwards and backwards of one step, without the optimizer
    stage_seconds: tuple[float, ...]  # forward + backward of one micro-batch
    stage_peak_bytes: tuple[int, ...]
    bubble_share: float  # of the devices' time within a step, the part in which they wait: 0 to 1
    optimizer_seconds: tuple[float, ...] = ()  # of each stage's optimizers, once a step
    period_seconds: float = 0.0  # from a step's begin to the next one's, with the optimizers


@dataclass(frozen=True)
class StagePlan:
    """Which blocks each device holds, and in how many micro-batches a batch passes through them."""

    blocks: tuple[BlockCost, ...]
    stages: tuple[Stage, ...]
    micro_batches: int  # of a batch, over all replicas
    predicted: Prediction
    memory: tuple[int, ...] | None = None  # bytes that each stage's device may hold; None: no limit
    ties: tuple[Shared, ...] = ()
    replicas: int = 1  # of each stage; they share the micro-batches of a batch

    def stage_name(self, number: int) -> str:
        """Return what a message calls the stage: its number and its blocks."""
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
        """Return a headline and a line a stage, at most 100 columns wide; ``measured`` adds columns."""
        return table.table(self, measured)

    def picture(self) -> str:
        """Return the simulated step as the text of an SVG."""
        labels = [
            f"stage {number}: {table.count(stage.last - stage.first, 'block')}, {table.size(peak)}"
            for number, (stage, peak) in enumerate(zip(self.stages, self.predicted.stage_peak_bytes, strict=True))
        ]
        return picture.picture(self.schedule(), table.headline(self), labels)
