"""What a check answers, and the order in which the findings of a cell are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from plumbline.core.outcome import Outcome


@dataclass(frozen=True)
class ErrorGrid:
    """Errors in multiples of noise, the largest over ranks: ``errors`` has a row a parameter and a column a step.

    ``parameters`` are parameters, or modules where there are many. None is an error that was not measured.
    """

    parameters: tuple[str, ...]
    steps: tuple[int, ...]
    errors: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class RankShares:
    """How ranks' own gradients were put together at one step: the weights with which they add up.

    ``received`` has a row for each rank whose optimizer got a gradient, and a column for each rank's own gradient.
    ``right`` is what a row should be.
    """

    step: int
    right: tuple[float, ...]
    received: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Finding:
    """The result of one check in one cell. What does not apply is None, never 0 or -1.

    ``error_x_noise`` is the error in multiples of the error that rounding alone explains, and ``limit_x_noise`` its
    limit for a correct trainer. ``step`` counts from 0. ``parameters`` has the error of each parameter at
    that step on that rank, in the model's order, where the finding is bad. ``consequence_of`` is the check whose
    finding in the same cell explains this one, None where it stands by itself. ``undeclared`` is what an unsupported
    cell needs and its subject does not declare: ``backend dp``, ``precision 16``, or capabilities by their names.
    ``hint`` is what to look at, as at the end of the message. ``cause_x_noise`` is how far the evidence is from what
    the cause predicts; None where it is counted. ``error_grid`` and ``rank_shares`` are drawn in reports.
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

NOT_FINITE = frozenset({"not-finite", "update-not-finite"})
"""Causes that leave weights which are no numbers: nothing else that is wrong matters before they are mended."""

ORDER = (
    "launch", "initial-weights", "samples", "steps", "rng", "gradients", "learning-rate", "skipped-steps", "update",
    "stillness", "ranks-agree", "validation", "buffers", "precision", "metrics", "checkpoint", "training",
)  # fmt: skip
"""Checks in the order in which a mistake spreads: each may be a consequence of those before it.

Samples, gradients, rates and updates are each judged from the subject's own state, so they are origins; ranks that
diverge and final weights that are wrong are consequences. A check that is not listed is read last.
"""

WHOLE_TRAININGS = ("checkpoint", "training")
"""Checks that compare whole trainings: a failure is their own only where every single step is right."""


class AnyFinding(Protocol):
    """A finding, as the judge makes it or as a run has recorded it."""

    @property
    def check(self) -> str:
        """The name of the check."""

    @property
    def outcome(self) -> Outcome:
        """How it ended."""

    @property
    def cause(self) -> str | None:
        """The named mistake, if one is known."""

    @property
    def consequence_of(self) -> str | None:
        """The check whose finding explains this one, None where it stands by itself."""


F = TypeVar("F", bound=AnyFinding)


def is_unexplained(finding: AnyFinding) -> bool:
    return finding.cause in (None, UNEXPLAINED)


def diagnosis(findings: Iterable[F]) -> F | None:
    """Return the bad finding that is read first, None if nothing is bad."""
    return next((finding for finding in in_reading_order(findings) if finding.outcome.is_bad), None)


def in_reading_order(findings: Iterable[F]) -> list[F]:
    """Return the findings of one cell in reading order, which everything that shows findings uses.

    Bad findings that stand by themselves come first, then their consequences, then what is not bad. Among equals, what
    leaves weights that are no numbers comes first, a comparison of whole trainings after the checks of single steps, a
    finding with a named cause before one without, and an earlier check of ``ORDER`` before a later one.
    """
    return sorted(findings, key=_place)


def leaves_no_numbers(finding: AnyFinding) -> bool:
    """Return whether weights are no numbers after what a finding tells, and no other finding explains it."""
    return finding.cause in NOT_FINITE and finding.consequence_of is None


def _place(finding: AnyFinding) -> tuple[bool, bool, bool, bool, bool, int]:
    check = finding.check
    return (
        not finding.outcome.is_bad,
        finding.consequence_of is not None,
        not leaves_no_numbers(finding),
        check in WHOLE_TRAININGS,
        is_unexplained(finding),
        ORDER.index(check) if check in ORDER else len(ORDER),
    )
