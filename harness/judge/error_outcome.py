"""How a measured error becomes an outcome."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.finding import Finding
from harness.core.outcome import Outcome


class Vacuous(Exception):  # noqa: N818 - it is a verdict about the check, not an error of the program
    """The check could not have failed on this evidence. The message says why."""


@dataclass(frozen=True)
class Deviation:
    """The largest error seen, in multiples of noise, and where."""

    x_noise: float
    step: int | None = None
    parameter: str | None = None
    rank: int | None = None

    @property
    def where(self) -> str:
        """The place in words."""
        places = (
            "" if self.step is None else f"step {self.step}",
            "" if self.parameter is None else f"{self.parameter}",
            "" if self.rank is None else f"rank {self.rank}",
        )
        return ", ".join(place for place in places if place) or "everywhere"


def larger(left: Deviation | None, right: Deviation) -> Deviation:
    """Return the larger error, the earlier one of equals; one that is not a number is the largest."""
    if left is None or math.isnan(right.x_noise) or right.x_noise > left.x_noise:
        return right
    return left


def by_parameter(deviations: Iterable[Deviation]) -> tuple[tuple[str, float], ...]:
    """Return the error of each parameter at one step on one rank."""
    return tuple((deviation.parameter, deviation.x_noise) for deviation in deviations if deviation.parameter)


def times(x_noise: float) -> str:
    """Write a multiple of noise for people: ``0.8``, ``12``, ``2e+06``."""
    return f"{x_noise:.2g} × noise"


def found(check: str, outcome: Outcome, message: str, deviation: Deviation, limit: float | None = None) -> Finding:
    """Return a finding that points to where the deviation is."""
    return Finding(
        check=check,
        outcome=outcome,
        message=message,
        error_x_noise=deviation.x_noise,
        step=deviation.step,
        parameter=deviation.parameter,
        rank=deviation.rank,
        limit_x_noise=limit,
    )


def single(check: str, subject: str, right: str, deviation: Deviation, limit: float) -> Finding:
    """Judge against the one thing that is right: ``subject``, in the plural, are or are not ``right``."""
    good = deviation.x_noise <= limit
    message = f"{subject} are {'' if good else 'not '}{right}: {times(deviation.x_noise)} at {deviation.where}"
    return found(check, Outcome.PASSED if good else Outcome.FAILED, message, deviation, limit)


def nearest(
    check: str, subject: str, *, whole: Deviation, contract: Deviation, gap: float, limit: float, promise: str
) -> Finding:
    """Judge against two hypotheses: what one device computes, and what the backend promises.

    ``gap`` is how far they are from each other, in × noise. Where rounding may explain that much they are one.
    Otherwise the nearer one is the one that was met, if it was met at all.
    """
    nearer = min(whole, contract, key=lambda deviation: deviation.x_noise)
    if nearer is whole or gap <= limit:
        return single(check, subject, "those of one device", nearer, limit)
    if contract.x_noise <= limit:
        message = (
            f"{subject} are not those of one device ({times(whole.x_noise)} from that), "
            f"but exactly what {promise} ({times(contract.x_noise)}, {contract.where})"
        )
        return found(check, Outcome.DEVIATES, message, contract, limit)
    message = (
        f"{subject} are neither those of one device ({times(whole.x_noise)}, {whole.where}) "
        f"nor what {promise} ({times(contract.x_noise)}, {contract.where})"
    )
    return found(check, Outcome.FAILED, message, contract, limit)
