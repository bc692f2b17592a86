"""Which finding of a cell explains the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from harness.core.outcome import Outcome

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

CONSEQUENCES = ("checkpoint", "training")
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


F = TypeVar("F", bound=Told)


def diagnosis(findings: Iterable[F]) -> F | None:
    """Return the bad finding with the greatest power to explain, None if nothing is bad."""
    return next(iter(told_first(finding for finding in findings if finding.outcome.is_bad)), None)


def told_first(findings: Iterable[F]) -> list[F]:
    """Return findings of one cell, those first that explain the others.

    One with a known cause comes before one without, and then what comes first on the way of a mistake. What is wrong
    without an interruption is never the checkpoint's, even if it has no name.
    """
    told = sorted(findings, key=_power)
    if told and told[0].check == "checkpoint":
        told.sort(key=lambda finding: (finding.check in CONSEQUENCES or not finding.outcome.is_bad, _power(finding)))
    return told


def _power(finding: Told) -> tuple[bool, bool, int]:
    unexplained = finding.cause in (None, UNEXPLAINED)
    place = ORDER.index(finding.check) if finding.check in ORDER else len(ORDER)
    return unexplained, not finding.outcome.is_bad, place
