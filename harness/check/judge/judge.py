"""All questions that are put to a recorded training, in the order in which their answers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.check.evidence import RecordedTraining
from harness.check.judge.gradients import judge_gradients
from harness.core.finding import Finding
from harness.core.outcome import Outcome

QUESTIONS: list[Callable[[RecordedTraining], Iterator[Finding]]] = [judge_gradients]


def judge(training: RecordedTraining) -> list[Finding]:
    """Return every finding about a training. A question that raises has no answer; it does not hide the others."""
    findings: list[Finding] = []
    for question in QUESTIONS:
        try:
            findings.extend(question(training))
        except Exception as error:
            name = question.__name__.removeprefix("judge_").replace("_", "-")
            findings.append(Finding(name, Outcome.ERRORED, f"it could not be judged: {type(error).__name__}: {error}"))
    return findings
