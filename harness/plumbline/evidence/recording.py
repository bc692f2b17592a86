"""What the evidence of a subject and that of a script have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


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
        """After which of these passes, counted from 0, a learning-rate scheduler stepped; none if not recorded."""
        return ()

    def steps_a_copy(self, other: StepRecord) -> bool:
        """Return whether two optimizers update parameters of the same names and shapes."""
        return (self.parameters, self.shapes) == (other.parameters, other.shapes)


class Recording(ABC):
    """The evidence of one training, of a subject or of a script."""

    @property
    @abstractmethod
    def optimizer_steps(self) -> Iterator[StepRecord]:
        """The steps of every rank, rank after rank."""

    @property
    def steps_side_by_side(self) -> Iterator[Mapping[int, StepRecord]]:
        """The same step of each rank that took it, by rank: the same optimizer's with the same number."""
        places: dict[tuple[int, int], dict[int, StepRecord]] = {}
        for one in self.optimizer_steps:
            places.setdefault((one.optimizer, one.number), {})[one.rank] = one
        yield from places.values()
