"""A new subject needs one file."""

from __future__ import annotations

from plumbline.core.outcome import Outcome, worst


def test_it_is_launched_and_judged(outside, trained):
    findings = trained(outside("subject"), "by-hand", "mlp", "ddp", "1x2")
    assert worst(finding.outcome for finding in findings.values()) is Outcome.PASSED, findings
