"""What the evidence of a subject and that of a script have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerStep:
    """One call of an optimizer's ``step`` on one rank; ``number`` counts from 0, skipped steps included.

    ``parameters`` are the names of those that the optimizer updates, ``gradient_norm`` is the norm of the gradient that
    it received. ``learning_rates`` has one entry for each parameter group, none if they were not recorded.
    ``skipped``: the GradScaler skipped the step.
    """

    rank: int
    number: int
    parameters: tuple[str, ...]
    gradient_norm: float
    learning_rates: tuple[float, ...]
    skipped: bool


class Recording(ABC):
    """The evidence of one training, of a subject or of a script."""

    @property
    @abstractmethod
    def optimizer_steps(self) -> Iterator[OptimizerStep]:
        """The steps of every rank, rank after rank."""
