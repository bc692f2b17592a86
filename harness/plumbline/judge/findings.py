"""Builds findings: how an error becomes an outcome, and the form of each message.

A message says what was observed, how large it is, and where: ``at step 3 on rank 1 in layers.0.weight``. A cause
appends what to look at.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from plumbline.core.finding import ErrorGrid, Finding, as_rows
from plumbline.core.numbers import compact, x_noise
from plumbline.core.outcome import Outcome
from plumbline.judge.oracle.noise import TOGETHER, Deviation, in_noise, larger


class Vacuous(Exception):  # noqa: N818 - it is a verdict about the check, not an error of the program
    """The check could not have failed on this trace. The message says why."""


@dataclass(frozen=True)
class Information(Finding):
    """A finding to read although it is no mistake. It counts as passed, but does not say that anything is right."""


def passed(check: str, observed: str) -> Finding:
    return Finding(check, Outcome.PASSED, observed)


def failed(
    check: str,
    observed: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    parameter: str | None = None,
    cause: str | None = None,
    family: str | None = None,
) -> Finding:
    """Return a finding of a check that failed; its message is ``observed``, followed by the place."""
    message = " ".join([observed, *_place(step, rank, parameter)])
    return Finding(
        check, Outcome.FAILED, message, cause=cause, family=family, step=step, parameter=parameter, rank=rank
    )  # fmt: skip


def failed_with_hint(check: str, observed: str, hint: str, **place_and_cause: Any) -> Finding:
    """Return a finding as ``failed`` does, with ``hint``, which says what to look at, at the end of the message."""
    finding = failed(check, observed, **place_and_cause)
    return replace(finding, message=f"{finding.message}: {hint}", hint=hint)


def with_hint(finding: Finding, hint: str) -> Finding:
    """Return a finding with its hint replaced, also in its message; unchanged if it has no hint."""
    if finding.hint is None:
        return finding
    return replace(finding, message=finding.message.replace(finding.hint, hint), hint=hint)


def from_deviation(
    check: str, outcome: Outcome, message: str, deviation: Deviation, limit: float | None = None
) -> Finding:
    """Return a finding that has a deviation's size and place in its fields."""
    return Finding(
        check,
        outcome,
        message,
        error_x_noise=deviation.x_noise,
        step=deviation.step,
        parameter=deviation.parameter,
        rank=deviation.rank,
        limit_x_noise=limit,
    )


def compare_with_one(check: str, observed: str, expected: str, deviation: Deviation, limit: float) -> Finding:
    """Judge ``observed``, a plural noun, against the only correct result."""
    good = deviation.x_noise <= limit
    message = f"{observed} {'match' if good else 'do not match'} {expected}: {error_at(deviation, limit)}"
    return from_deviation(check, Outcome.PASSED if good else Outcome.FAILED, message, deviation, limit)


def compare_with_two(
    check: str,
    observed: str,
    *,
    one_device: Deviation,
    contract: Deviation,
    gap: float,
    limit: float,
    promise: str,
) -> Finding:
    """Judge ``observed`` against what one device computes and against ``promise``, the backend's contract.

    ``gap`` is the distance between the two in × noise. If rounding can explain it, they count as one. Otherwise only
    the nearer one can match.
    """
    nearer = min(one_device, contract, key=lambda deviation: deviation.x_noise)
    if nearer is one_device or gap <= limit:
        return compare_with_one(check, observed, "those of one device", nearer, limit)
    error = error_at(contract, limit)
    if contract.x_noise <= limit:
        message = f"{observed} are {x_noise(one_device.x_noise)} from those of one device, but match {promise}: {error}"
        return from_deviation(check, Outcome.DEVIATES, message, contract, limit)
    message = f"{observed} match neither those of one device ({error_at(one_device, limit)}) nor {promise} ({error})"
    return from_deviation(check, Outcome.FAILED, message, contract, limit)


class TwoWayComparison:
    """Collects errors against the backend's contract and against one device, which may compute in several ways.

    A trainer follows one of these ways at every step, so the largest error is kept for each way separately.
    """

    def __init__(self) -> None:
        self.contract: Deviation | None = None
        self._ways: dict[int, Deviation] = {}
        self._gaps: dict[int, float] = {}

    def add(
        self, at: Deviation, noise: float, contract: float, one_device: Sequence[float], gaps: Sequence[float] = ()
    ) -> None:
        """Add one value, at the place of ``at``.

        Args:
            at: a deviation with the place; its size is ignored.
            noise: the noise of the value.
            contract: the distance of the value from the contract's.
            one_device: the distance from each way of one device.
            gaps: the distance between each way of one device and the contract.
        """
        self.contract = larger(self.contract, replace(at, x_noise=in_noise(contract, noise)))
        for way, error in enumerate(one_device):
            self._ways[way] = larger(self._ways.get(way), replace(at, x_noise=in_noise(error, noise)))
        for way, gap in enumerate(gaps):
            self._gaps[way] = max(self._gaps.get(way, 0.0), in_noise(gap, noise))

    def finding(self, check: str, observed: str, promise: str, limit: float) -> Finding:
        """Judge the values that were added, at least one, by the nearest way and the smallest gap."""
        assert self.contract is not None
        one_device = min(self._ways.values(), key=lambda deviation: deviation.x_noise)
        gap = min(self._gaps.values())
        return compare_with_two(
            check, observed, one_device=one_device, contract=self.contract, gap=gap, limit=limit, promise=promise
        )


def error_at(deviation: Deviation, limit: float) -> str:
    """Format an error, its limit and its place: ``error 40 × noise (limit 9.4) at step 3 on rank 1 in weight``."""
    place = _place(deviation.step, deviation.rank, deviation.parameter)
    return " ".join([f"error {x_noise(deviation.x_noise)} (limit {compact(limit)})", *place])


def with_parameters(finding: Finding, deviations: Iterable[Deviation]) -> Finding:
    """Return a finding with the error of each parameter at its step on its rank."""
    there = [one for one in deviations if (one.step, one.rank) == (finding.step, finding.rank)]
    return replace(finding, parameters=tuple((one.parameter, one.x_noise) for one in there if one.parameter))


def _place(step: int | None, rank: int | None, parameter: str | None) -> list[str]:
    words = (("at step", step), ("on rank", rank), ("in", parameter))
    return [f"{word} {value}" for word, value in words if value is not None]


MOST_PARAMETERS: Final = 24
MOST_STEPS: Final = 24
STEPS_BEFORE: Final = 4
"""Steps that a grid shows before the finding's step, if not all steps fit."""


def with_error_grid(finding: Finding, deviations: Iterable[Deviation]) -> Finding:
    """Return a finding with the largest error of each parameter at each step, over ranks.

    With many parameters, each row is a module; with many steps, only those around the finding's step are kept.
    """
    found = [one for one in deviations if one.step is not None and one.parameter not in (None, TOGETHER)]
    names = as_rows((str(one.parameter) for one in found), MOST_PARAMETERS)
    steps = sorted({one.step for one in found if one.step is not None})
    begin = max(0, min(len(steps) - MOST_STEPS, bisect_left(steps, finding.step or 0) - STEPS_BEFORE))
    shown = steps[begin : begin + MOST_STEPS]
    errors: dict[tuple[str, int], float] = {}
    for one in found:
        place = names[str(one.parameter)], one.step or 0
        errors[place] = max(errors.get(place, 0.0), math.inf if math.isnan(one.x_noise) else one.x_noise)
    rows = sorted(
        dict.fromkeys(names.values()), key=lambda row: -max((errors.get((row, step), 0.0) for step in shown), default=0)
    )[:MOST_PARAMETERS]
    kept = [name for name in dict.fromkeys(names.values()) if name in rows]
    if not kept:
        return finding
    table = [[float(f"{errors[row, step]:.2g}") if (row, step) in errors else None for step in shown] for row in kept]
    grid = ErrorGrid(tuple(kept), tuple(shown), tuple(map(tuple, table)))
    return replace(finding, error_grid=grid)
