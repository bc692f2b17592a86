"""The first finding is the worst one."""

from __future__ import annotations

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.script_checks import judge
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS


def finding_of(check, cause):
    def judged(training):
        yield Finding(check, Outcome.FAILED, "", cause=cause)

    return judged


def test_gradients_that_are_no_numbers_come_before_samplers(monkeypatch):
    wrong = [("samples", "set-epoch-never-called"), ("skipped-steps", "not-finite"), ("update", "update-not-finite")]
    monkeypatch.setitem(CHECKS, RecordedTraining, {check: finding_of(check, cause) for check, cause in wrong})
    found = judge(RecordedTraining(()))
    assert [one.check for one in found] == ["skipped-steps", "update", "samples"]
