"""A check costs one function and one line of ``CHECKS``."""

from __future__ import annotations

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.checks import CHECKS


def few_samples(analysis):
    """At most 100 samples are used in a step."""
    most = max(
        len(micro.loss or ()) for step in analysis.steps_taken for one in step.ranks for micro in one.micro_batches
    )
    return Finding("few-samples", Outcome.PASSED if most <= 100 else Outcome.FAILED, f"at most {most} samples")


def test_it_is_asked_of_every_trace(outside, trained, monkeypatch):
    monkeypatch.setitem(CHECKS, "few-samples", few_samples)
    finding = trained(outside("subject"), "by-hand", "mlp", "ddp", "1x2")["few-samples"]
    assert (finding.outcome, finding.message) == (Outcome.PASSED, "at most 12 samples")
