"""Which finding of a cell explains the others."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.finding import Finding

UNEXPLAINED = "unexplained"

ORDER = (
    "launch", "initial-weights", "samples", "steps", "gradients", "learning-rate", "skipped-steps", "update",
    "stillness", "ranks-agree", "buffers", "precision", "training",
)  # fmt: skip
"""Checks in the order in which a mistake travels: each may be a consequence of those before it.

Samples, gradients, rates and updates are each judged from the subject's own state, so they are origins; ranks that
part and weights that end elsewhere are what becomes of them.
"""


def diagnosis(findings: Iterable[Finding]) -> Finding | None:
    """Return the bad finding with the greatest power to explain, None if nothing is bad.

    One with a known cause comes before one without, and then what comes first on the way of a mistake.
    """
    bad = [finding for finding in findings if finding.outcome.is_bad]
    return min(bad, key=_power, default=None)


def _power(finding: Finding) -> tuple[bool, int]:
    unexplained = finding.cause in (None, UNEXPLAINED)
    return unexplained, ORDER.index(finding.check) if finding.check in ORDER else len(ORDER)
