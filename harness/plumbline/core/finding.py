"""The result of a check, and the order in which a cell's findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from plumbline.core.outcome import Outcome


@dataclass(frozen=True)
class ErrorGrid:
    """Errors in multiples of noise, the largest over ranks, with a row per parameter and a column per step.

    If there are many ``parameters``, they are modules instead. None is an error that was not measured.
    """

    parameters: tuple[str, ...]
    steps: tuple[int, ...]
    errors: tuple[tuple[float | None, ...], ...]


def as_rows(parameters: Iterable[str], most: int) -> dict[str, str]:
    """Return for each parameter the name of its row: itself, or its module as deep as ``most`` rows allow."""
    names = list(dict.fromkeys(parameters))
    rows: dict[str, str] = {}
    for depth in range(max((name.count(".") for name in names), default=-1) + 1, 0, -1):
        rows = {name: ".".join(name.split(".")[:depth]) for name in names}
        if len(set(rows.values())) <= most:
            break
    return rows


@dataclass(frozen=True)
class RankShares:
    """The weights with which the ranks' own gradients were combined at one step.

    ``received`` has a row for each rank whose optimizer got a gradient, and a column for each rank's own gradient.
    ``right`` is the correct row.
    """

    step: int
    right: tuple[float, ...]
    received: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Finding:
    """The result of one check in one cell, with the place of the error. What does not apply is None.

    Args:
        message: what was observed, how large it is, and what to look at.
        cause: the named mistake, with its ``family``.
        error_x_noise: the error in multiples of the error that rounding alone explains.
        step: the step, counted from 0.
        limit_x_noise: the limit of ``error_x_noise`` for a correct trainer.
        parameters: the error of each parameter at that step on that rank, in the model's order.
        consequence_of: the check whose finding in the same cell explains this one.
        undeclared: what an unsupported cell needs and its subject does not declare: ``backend dp``, ``precision 16`` or
            the names of capabilities.
        hint: what to look at.
        cause_x_noise: the distance between the evidence and what the cause predicts, in multiples of noise. None if the
            cause is found by counting.
    """

    check: str
    outcome: Outcome
    message: str
    cause: str | None = None
    family: str | None = None
    error_x_noise: float | None = None
    step: int | None = None
    parameter: str | None = None
    rank: int | None = None
    limit_x_noise: float | None = None
    parameters: tuple[tuple[str, float], ...] = ()
    consequence_of: str | None = None
    undeclared: tuple[str, ...] = ()
    hint: str | None = None
    cause_x_noise: float | None = None
    error_grid: ErrorGrid | None = None
    rank_shares: RankShares | None = None


UNEXPLAINED = "unexplained"
"""The cause of a finding that no known mistake explains."""

VACUOUS = "vacuous"
"""The beginning of the message of a check that could not have failed."""

RAISED = "the check raised an error, so it has no verdict: "
"""The beginning of the message of a check that an exception ended."""

NOT_FINITE = frozenset({"not-finite", "update-not-finite"})
"""Causes that leave weights that are not finite. They must be corrected before anything else matters."""

ORDER = (
    "launch", "initial-weights", "samples", "steps", "rng", "gradients", "learning-rate", "skipped-steps", "update",
    "stillness", "ranks-agree", "validation", "buffers", "precision", "metrics", "checkpoint", "training",
)  # fmt: skip
"""Checks in the order in which a mistake spreads: each may be a consequence of those before it.

Checks that are not listed come last.
"""

WHOLE_TRAININGS = ("checkpoint", "training")
"""Checks that compare whole trainings. Their failure stands by itself only if every single step is right."""


class AnyFinding(Protocol):
    """The attributes that a ``Finding`` of the judge and a finding of a recorded run have in common."""

    @property
    def check(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def cause(self) -> str | None: ...
    @property
    def family(self) -> str | None: ...
    @property
    def error_x_noise(self) -> float | None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def parameter(self) -> str | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def consequence_of(self) -> str | None: ...


F = TypeVar("F", bound=AnyFinding)


def is_unexplained(finding: AnyFinding) -> bool:
    return finding.cause in (None, UNEXPLAINED)


def diagnosis(findings: Iterable[F]) -> F | None:
    """Return the first bad finding in reading order, None if nothing is bad."""
    return next((finding for finding in in_reading_order(findings) if finding.outcome.is_bad), None)


def in_reading_order(findings: Iterable[F]) -> list[F]:
    """Return the findings of one cell in the order in which they are shown.

    Bad findings that stand by themselves come first, then their consequences, then the others. Among these, non-finite
    weights come first, single steps before whole trainings, named causes before unknown ones, and then by ``ORDER``.
    """
    return sorted(findings, key=_sort_key)


def by_themselves(findings: Sequence[F]) -> list[F]:
    """Return the mistakes among bad findings in reading order: the first, and others that name their own cause.

    A further finding counts if it failed and is no consequence of another one.
    """
    return [
        *findings[:1],
        *(
            one
            for one in findings[1:]
            if one.consequence_of is None and one.outcome is Outcome.FAILED and not is_unexplained(one)
        ),
    ]


def leaves_no_numbers(finding: AnyFinding) -> bool:
    """Return whether a finding leaves non-finite weights and stands by itself."""
    return finding.cause in NOT_FINITE and finding.consequence_of is None


def _sort_key(finding: AnyFinding) -> tuple[bool, bool, bool, bool, bool, int]:
    check = finding.check
    return (
        not finding.outcome.is_bad,
        finding.consequence_of is not None,
        not leaves_no_numbers(finding),
        check in WHOLE_TRAININGS,
        is_unexplained(finding),
        ORDER.index(check) if check in ORDER else len(ORDER),
    )
