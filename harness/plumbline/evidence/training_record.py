"""The interface that the evidence of a subject and the evidence of a script have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, eq=False)
class StepRecord(ABC):
    """One call of an optimizer's ``step`` on one rank; ``number`` counts from 0, skipped steps included.

    ``optimizer`` counts the optimizers of a script's process. Those of a subject make one step together, so it is 0.
    """

    rank: int
    number: int
    optimizer: int = 0

    @property
    @abstractmethod
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that the optimizer updates."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of these parameters, in the same order."""

    @property
    @abstractmethod
    def gradient_norm(self) -> float:
        """The norm of the gradient that the optimizer received."""

    @property
    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """One rate for each parameter group, none if they were not recorded."""

    @property
    @abstractmethod
    def skipped(self) -> bool:
        """Whether the GradScaler skipped the step."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """The number of micro-batches whose backward passes belong to the step."""

    @property
    def schedule_moves(self) -> tuple[int, ...]:
        """The passes, counted from 0, after which a scheduler stepped before the optimizer; empty if not recorded."""
        return ()


@dataclass(frozen=True)
class SkippedStep:
    """A step that a GradScaler skipped on one rank, for all of its optimizers or for one of several.

    ``moved`` says what changed nevertheless, such as ``3 of 4 parameters``, "" if nothing did; ``parameter`` is the
    first that changed. ``overflowed``: whether a gradient was not finite, None if that was not recorded. ``scale`` was
    the loss scale, and ``next_scale`` is the scale of the rank's next step, None if it is unknown or the trainer does
    not have to lower it.
    """

    rank: int
    number: int
    moved: str
    overflowed: bool | None
    parameter: str | None = None
    scale: float | None = None
    next_scale: float | None = None


class TrainingRecord(ABC):
    """The evidence of one training, of a subject or of a script."""

    @property
    @abstractmethod
    def optimizer_steps(self) -> Iterator[StepRecord]:
        """The steps of every rank, rank after rank."""

    @property
    def steps_side_by_side(self) -> Iterable[Mapping[int, StepRecord]]:
        """For each optimizer and step number, the step of each rank that took it, by rank."""
        return side_by_side(self.optimizer_steps)


class _NumberedStep(Protocol):
    @property
    def optimizer(self) -> int: ...

    @property
    def number(self) -> int: ...


AnyStep = TypeVar("AnyStep", bound=_NumberedStep)
AnyRecord = TypeVar("AnyRecord", bound=StepRecord)


class StepOfRanks(dict[int, AnyStep]):
    """The step that several ranks took together, by rank. ``optimizer`` and ``number`` are those of the first rank."""

    @property
    def first(self) -> AnyStep:
        return next(iter(self.values()))

    @property
    def optimizer(self) -> int:
        return self.first.optimizer

    @property
    def number(self) -> int:
        return self.first.number

    @property
    def is_one(self) -> bool:
        """Whether it is the same step of the same optimizer on all of these ranks."""
        return len({(one.optimizer, one.number) for one in self.values()}) == 1


def side_by_side(steps: Iterable[AnyRecord]) -> Iterable[StepOfRanks[AnyRecord]]:
    """Return, for each optimizer and step number, the step of each rank that took it, by rank."""
    places: dict[tuple[int, int], StepOfRanks[AnyRecord]] = {}
    for one in steps:
        places.setdefault((one.optimizer, one.number), StepOfRanks())[one.rank] = one
    return places.values()


def step_copies(steps: Iterable[StepRecord]) -> bool:
    """Return whether all steps update parameters with the same names and shapes, as steps of copies of one model do."""
    return len({(one.parameters, one.shapes) for one in steps}) == 1
