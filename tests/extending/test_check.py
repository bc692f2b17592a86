"""A new check needs one file with a line of ``CHECKS``, and judges a subject and a script."""

from __future__ import annotations

import pytest
import torch

from plumbline.check.evidence.training import RecordedTraining
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS
from plumbline.judge.trace_analysis import TraceAnalysis


def few_samples(analysis):
    """At most 100 samples are used in a step."""
    steps = [rank for step in analysis.steps_taken for rank in step.ranks]
    most = max(len(micro.loss or ()) for step in steps for micro in step.micro_batches)
    return Finding("few-samples", Outcome.PASSED if most <= 100 else Outcome.FAILED, f"at most {most} samples")


def test_it_is_asked_of_every_trace(outside, trained, monkeypatch):
    monkeypatch.setitem(CHECKS[TraceAnalysis], "few-samples", few_samples)
    finding = trained(outside("subject"), "by-hand", "mlp", "ddp", "1x2")["few-samples"]
    assert (finding.outcome, finding.message) == (Outcome.PASSED, "at most 12 samples")


def test_one_of_any_recording_judges_a_subject(outside, trained):
    outside("check")
    finding = trained(outside("subject"), "by-hand", "mlp", "ddp", "1x2")["small-gradients"]
    assert (finding.outcome, finding.message) == (Outcome.PASSED, "gradients of 12 steps")


@pytest.mark.parametrize(("factor", "outcome"), [(1, Outcome.PASSED), (1e6, Outcome.FAILED)])
def test_the_same_check_judges_a_script(plumbline, outside, factor, outcome):
    def train():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).mean() * factor).backward()
            optimizer.step()

    outside("check")
    (training,) = plumbline.check(train, ranks=1, steps=3).trainings
    (finding,) = (one for one in training.findings if one.check == "small-gradients")
    assert (finding.outcome, finding.message) == (outcome, "gradients of 3 steps")


def test_a_check_that_raises_has_no_verdict_and_hides_no_other(plumbline, monkeypatch):
    def broken(recording):
        yield Finding("broken", Outcome.PASSED, "before")
        raise ValueError("no such step")

    def train():
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.square().sum().backward()
        torch.optim.SGD([parameter], 0.1).step()

    monkeypatch.setitem(CHECKS[RecordedTraining], "broken", broken)
    (training,) = plumbline.check(train, ranks=1, steps=1).trainings
    found = {one.outcome: one.message for one in training.findings if one.check == "broken"}
    assert found[Outcome.PASSED] == "before"
    assert "has no verdict: ValueError: no such step (broken, line " in found[Outcome.ERRORED]
    assert any(one.check == "gradients" for one in training.findings)
