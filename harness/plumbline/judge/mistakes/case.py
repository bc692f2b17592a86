"""Mistakes in gradients: how they combine the right shares, and the case from which they predict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plumbline.core.numbers import scale_text
from plumbline.judge.hypothesis import Hypothesis, Match

Weight = Callable[[int, int, int], float]
"""The weight of a share, from its rank, its micro-batch and the rank's number of micro-batches.

A share is what a micro-batch of a rank adds to the right gradient, so a weight of 1 everywhere is right.
"""


@dataclass(frozen=True, eq=False)
class Combination:
    """A sum of shares with weights.

    Attributes:
        weight: the weights of this step's shares.
        earlier: the weights of the previous step's shares; None if these do not count.
        left_over: the factor with which the gradient that the optimizer received one step before is added.
    """

    weight: Weight
    earlier: Weight | None = None
    left_over: float = 0.0


@dataclass(frozen=True, eq=False)
class SomeParameters:
    """The right gradient for some parameters, and a combination for the others."""

    combination: Combination


def even(factor: float) -> Weight:
    """Give every share the same weight; a weight of 1 is right."""
    return lambda rank, place, count: factor


def scaled(factor: float) -> Combination:
    """Return the right gradient times a factor."""
    return Combination(even(factor))


RIGHT = scaled(1.0)
"""Every share with the weight 1."""


class GradientCase(ABC):
    """One rank at one step, for any source of the right gradient.

    A misfit is the distance of the received gradient from a prediction, in multiples of what rounding explains.
    """

    index: int
    """The step, counted from 0."""

    rank: int

    @property
    @abstractmethod
    def world(self) -> int:
        """The number of ranks whose gradients are averaged."""

    @property
    @abstractmethod
    def micro_batches(self) -> int:
        """The number of micro-batches of this step."""

    @property
    @abstractmethod
    def accumulate(self) -> int:
        """The number of micro-batches of a full window."""

    @property
    @abstractmethod
    def scales(self) -> Sequence[float | None]:
        """The loss scale of each rank; None or 1 without one."""

    @property
    @abstractmethod
    def has_shares(self) -> Sequence[bool]:
        """For each rank, whether it has a share in every micro-batch."""

    @property
    @abstractmethod
    def has_earlier_step(self) -> bool:
        """Whether the previous step's right gradient, and the one that the optimizer received, are known."""

    @property
    @abstractmethod
    def zeros(self) -> Sequence[bool]:
        """For each parameter, whether the optimizer received a gradient of exact zeros, or none."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """The number by which the right gradients come nearest to the wrong ones, at all steps."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """The largest misfit that rounding explains."""

    @abstractmethod
    def misfits(self, prediction: Any) -> Iterator[float]:
        """Yield the misfit of each form that a prediction can take; nothing if it has no effect."""

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the distance from the right gradient."""
        return any(misfit <= self.limit for misfit in self.misfits(RIGHT))

    @property
    def location(self) -> str:
        """Step and rank in words."""
        return f"step {self.index}" + (f" on rank {self.rank}" if self.world > 1 else "")

    @property
    def figures(self) -> Mapping[str, object]:
        """The values for the placeholders in a mistake's texts."""
        return {
            "world": self.world,
            "micro_batches": self.micro_batches,
            "accumulate": self.accumulate,
            "rank": self.rank,
            "scale": scale_text(self.scale or 1.0),
            "factor": f"{self.factor:.4g}",
        }

    @property
    def scale(self) -> float | None:
        """The loss scale of this rank, None without one."""
        own = self.scales[self.rank] if self.rank < len(self.scales) else None
        return None if own == 1.0 else own


Predictions = Iterator[Combination | SomeParameters | Match]
"""The variants of what a mistake can make of the right gradient."""

GradientMistake = Hypothesis[GradientCase, Combination | SomeParameters | Match]
"""A mistake that is known by how it combines the shares of ranks and micro-batches."""


def multiplied(factors: Callable[[GradientCase], Iterable[float]]) -> Callable[[GradientCase], Predictions]:
    """Return the prediction of the right gradient times each factor."""

    def predict(case: GradientCase) -> Predictions:
        yield from map(scaled, factors(case))

    return predict


def in_some_parameters(predict: Callable[[GradientCase], Predictions]) -> Callable[[GradientCase], Predictions]:
    """Return the prediction of a mistake in some parameters, while the others are right."""

    def predict_in_some(case: GradientCase) -> Predictions:
        yield from (SomeParameters(one) for one in predict(case) if isinstance(one, Combination))

    return predict_in_some


def several(count: int) -> list[float]:
    """Return the number as a factor, nothing if it is not more than 1."""
    return [float(count)] if count > 1 else []
