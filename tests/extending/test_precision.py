"""A new precision needs one file."""

from __future__ import annotations

from plumbline.core.outcome import Outcome, worst
from plumbline.report.tables.support import Configuration


def test_it_is_launched_and_judged_by_what_it_says_of_itself(outside, trained):
    findings = trained(outside("precision"), "mixes", "mlp", "none", "1x1", "16-unscaled")
    assert {"gradients", "update", "training"} <= findings.keys()
    assert worst(finding.outcome for finding in findings.values()) is Outcome.PASSED, findings


def test_it_is_reported_as_a_16_bit_format(outside):
    outside("precision")
    row = Configuration("mixes", "none", False, False, "16-unscaled", "cpu")
    assert row.described_by() == {"1 GPU", "16-bit"}
    assert row.command({1}, {1}) == "mixes: 1 gpu, 16-unscaled"
