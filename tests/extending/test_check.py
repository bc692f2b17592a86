"""A check costs one function and one line of ``CHECKS``."""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS


def few_samples(analysis):
    """At most 100 samples are used in a step."""
    steps = [rank for step in analysis.steps_taken for rank in step.ranks]
    most = max(len(micro.loss or ()) for step in steps for micro in step.micro_batches)
    return Finding("few-samples", Outcome.PASSED if most <= 100 else Outcome.FAILED, f"at most {most} samples")


def test_it_is_asked_of_every_trace(outside, trained, monkeypatch):
    monkeypatch.setitem(CHECKS, "few-samples", few_samples)
    finding = trained(outside("subject"), "by-hand", "mlp", "ddp", "1x2")["few-samples"]
    assert (finding.outcome, finding.message) == (Outcome.PASSED, "at most 12 samples")
