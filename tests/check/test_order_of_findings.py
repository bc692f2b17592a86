"""What is read first of all that is wrong with a user's training: the worst."""

from __future__ import annotations

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge import judge as judging
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome


def question(check, cause):
    def ask(training):
        yield Finding(check, Outcome.FAILED, "", cause=cause)

    return ask


def test_gradients_that_are_no_numbers_come_before_samplers(monkeypatch):
    wrong = [("samples", "set-epoch-never-called"), ("skipped-steps", "not-finite"), ("update", "update-not-finite")]
    monkeypatch.setattr(judging, "QUESTIONS", [question(*one) for one in wrong])
    found = judging.judge(RecordedTraining(()))
    assert [one.check for one in found] == ["skipped-steps", "update", "samples"]
