"""What a mistake makes of the right shares of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Weight = Callable[[int, int, int], float]
"""The weight of a share, from its rank, its micro-batch and the rank's number of micro-batches.

A share is what a micro-batch of a rank adds to the right gradient, so a weight of 1 everywhere is right.
"""


@dataclass(frozen=True, eq=False)
class Combination:
    """A sum of shares with weights.

    Attributes:
        weight: the weights of this step's shares.
        earlier: the weights of the shares of the step before; None where they do not count.
        left_over: how many times the gradient that the optimizer received one step before is added.
    """

    weight: Weight
    earlier: Weight | None = None
    left_over: float = 0.0


@dataclass(frozen=True, eq=False)
class SomeParameters:
    """The right gradient for some parameters, and a combination for the others."""

    combination: Combination


def even(factor: float) -> Weight:
    """Weigh every share alike; with 1, that is right."""
    return lambda rank, place, count: factor


def scaled(factor: float) -> Combination:
    """Return the right gradient times a factor."""
    return Combination(even(factor))


RIGHT = scaled(1.0)
"""Every share with the weight 1."""
