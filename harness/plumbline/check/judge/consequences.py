"""Says which failures follow from others, and takes back what would only follow from a mistake that was not made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plumbline.check.judge.advice import AFTER_CLIPPING, with_hint
from plumbline.check.judge.noted import Information
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome

CLIPPED_FIRST = "clipped-before-averaging"


def settle(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, those that follow from a check without a failure as information.

    Ranks whose gradients differ by design, as with averaged models, or by rounding, then hold different weights, and
    nobody is accused of it.
    """
    if any(finding.cause == CLIPPED_FIRST for finding in findings):
        # Gradients are judged as they were clipped: of each rank's own samples, since they are reduced only then.
        findings = [
            replace(with_hint(one, AFTER_CLIPPING), consequence_of="clipping")
            if one.check == "gradients" or one.cause == "not-synchronised"
            else one
            for one in findings
        ]
    bad = {finding.check for finding in findings if finding.outcome.is_bad}
    return [
        _no_failure(finding, finding.consequence_of)
        if finding.consequence_of is not None and finding.consequence_of not in bad
        else finding
        for finding in findings
    ]


def _no_failure(finding: Finding, origin: str) -> Finding:
    message = f"{finding.message}; this is not counted as wrong, because nothing is wrong in {origin}"
    changed = {"outcome": Outcome.PASSED, "message": message, "cause": None, "family": None, "consequence_of": None}
    return Information(**vars(finding) | changed)
