"""What a check answers, and the order in which the findings of a cell are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from harness.core.outcome import Outcome


@dataclass(frozen=True)
class Finding:
    """One check's answer about one cell. What does not apply is None, never 0 or -1.

    ``error_x_noise`` is the error in multiples of what rounding alone explains, and ``limit_x_noise`` how much of it a
    right trainer may show. ``step`` counts optimizer steps from 0. ``parameters`` has the error of each parameter at
    that step on that rank, in the model's order, where the finding is bad. ``consequence_of`` is the check whose
    finding in the same cell explains this one, None where it stands by itself. ``undeclared`` is what an unsupported
    cell needs and its subject does not declare: ``backend dp``, ``precision 16``, or capabilities by their names.
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


UNEXPLAINED = "unexplained"
"""The cause of a finding for which one was looked for in vain."""

ORDER = (
    "launch", "initial-weights", "samples", "steps", "rng", "gradients", "learning-rate", "skipped-steps", "update",
    "stillness", "ranks-agree", "validation", "buffers", "precision", "metrics", "checkpoint", "training",
)  # fmt: skip
"""Checks in the order in which a mistake travels: each may be a consequence of those before it.

Samples, gradients, rates and updates are each judged from the subject's own state, so they are origins; ranks that
part and weights that end elsewhere are what becomes of them.
"""

WHOLE_TRAININGS = ("checkpoint", "training")
"""Checks that compare whole trainings: what they see is theirs only where every step is right in itself."""


class Told(Protocol):
    """A finding, as the judge makes it or as a run has recorded it."""

    @property
    def check(self) -> str:
        """The question."""

    @property
    def outcome(self) -> Outcome:
        """The answer."""

    @property
    def cause(self) -> str | None:
        """The named mistake, if one is known."""

    @property
    def consequence_of(self) -> str | None:
        """The check whose finding explains this one, None where it stands by itself."""


F = TypeVar("F", bound=Told)


def is_unexplained(finding: Told) -> bool:
    """Say whether a finding names no cause."""
    return finding.cause in (None, UNEXPLAINED)


def diagnosis(findings: Iterable[F]) -> F | None:
    """Return the bad finding that is read first, None if nothing is bad."""
    return next((finding for finding in told_first(findings) if finding.outcome.is_bad), None)


def told_first(findings: Iterable[F]) -> list[F]:
    """Return the findings of one cell in reading order. Everything that shows findings uses this order.

    Bad findings that stand by themselves come first, then their consequences, then what is not bad. Among equals, a
    comparison of whole trainings comes after the checks of single steps, a finding with a named cause before one
    without, and an earlier check of ``ORDER`` before a later one.
    """
    return sorted(findings, key=_place)


def _place(finding: Told) -> tuple[bool, bool, bool, bool, int]:
    check = finding.check
    return (
        not finding.outcome.is_bad,
        finding.consequence_of is not None,
        check in WHOLE_TRAININGS,
        is_unexplained(finding),
        ORDER.index(check) if check in ORDER else len(ORDER),
    )
