"""Values that planning and running exchange: the cost of blocks, the blocks of a stage, and predictions."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """A parameter or buffer that several blocks use: a device that holds several of them stores and steps it once."""

    name: str
    blocks: tuple[int, ...]  # ascending
    bytes: int
    optimizer_seconds: float = 0.0


@dataclass
class Travelling:
    """A storage that passes between blocks.

    A device holds it if its first block is given it, its last block returns it, or a block keeps it.
    """

    bytes: int
    keepers: list[int] = field(default_factory=list)  # blocks that keep it for backward: it is within their saved_bytes
    enters: list[int] = field(default_factory=list)  # blocks that are given it
    leaves: list[int] = field(default_factory=list)  # blocks that return it


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
    """What a step of the plan is expected to take, or was measured to take."""

    step_seconds: float  # all forwards and backwards of one step, without the optimizer
    stage_seconds: tuple[float, ...]  # forward + backward of one micro-batch
    stage_peak_bytes: tuple[int, ...]
    bubble_share: float  # of the devices' time within a step, the part in which they wait: 0 to 1
    optimizer_seconds: tuple[float, ...] = ()  # of each stage's optimizers, once a step
    period_seconds: float = 0.0  # from the start of a step to the next one, with the optimizers
