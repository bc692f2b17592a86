"""What stands right under the verdict although it decides nothing: what the script does, and is seldom meant."""

from __future__ import annotations

from plumbline.check.judge.judging import CheckedTraining
from plumbline.check.judge.noted import HeadlineNote


def notes_on(one: CheckedTraining) -> list[str]:
    """Return the notes on a training, each in whole sentences."""
    return [finding.message for finding in one.findings if isinstance(finding, HeadlineNote)]
