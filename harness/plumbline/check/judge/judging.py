"""Judges what the processes of a command recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plumbline.check.evidence.read import read_trainings
from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.coverage import Coverage, coverage_of
from plumbline.check.judge.estimate import CostEstimate, estimate
from plumbline.check.judge.judge import judge
from plumbline.core.finding import Finding, in_reading_order


@dataclass(frozen=True)
class CheckedTraining:
    """One training of a command and what was found in it, in reading order; ``estimate`` is that of a dry run."""

    training: RecordedTraining
    findings: list[Finding]
    coverage: Coverage
    estimate: CostEstimate | None = None


def judged_trainings(folder: Path) -> list[CheckedTraining]:
    """Return the trainings that were recorded below a folder, each with its findings.

    Raises:
        TraceError: evidence cannot be read.
    """
    return [_judged(one, folder) for one in read_trainings(folder)]


def _judged(training: RecordedTraining, folder: Path) -> CheckedTraining:
    findings = in_reading_order(judge(training))
    return CheckedTraining(training, findings, coverage_of(training, findings), estimate(training, folder))
