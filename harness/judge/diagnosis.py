"""Which finding of a cell explains the others."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.finding import Finding

UNEXPLAINED = "unexplained"

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


def diagnosis(findings: Iterable[Finding]) -> Finding | None:
    """Return the bad finding with the greatest power to explain, None if nothing is bad.

    One with a known cause comes before one without, and then what comes first on the way of a mistake. What is wrong
    without an interruption is never the checkpoint's, even if it has no name.
    """
    bad = [finding for finding in findings if finding.outcome.is_bad]
    origins = [finding for finding in bad if finding.check not in CONSEQUENCES]
    told = min(bad, key=_power, default=None)
    return min(origins, key=_power) if told is not None and told.check == "checkpoint" and origins else told


def _power(finding: Finding) -> tuple[bool, int]:
    unexplained = finding.cause in (None, UNEXPLAINED)
    return unexplained, ORDER.index(finding.check) if finding.check in ORDER else len(ORDER)
