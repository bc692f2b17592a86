"""The verdict as a page: one file that works offline and without scripts, in the form of a run's page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment

from plumbline.check.command.command import CheckedCommand
from plumbline.check.judge.judging import CheckedTraining
from plumbline.check.report.lines import Line, coverage_lines, durations, lines_of, script_end, training_line
from plumbline.check.verdict.notes import notes_on
from plumbline.check.verdict.verdict import Answer, Verdict, accusations, answer_of, sentence_on
from plumbline.core.finding import Finding
from plumbline.machine.installed_software import plumbline_version
from plumbline.report.finding_words import place_and_size
from plumbline.report.html.environment import page_environment

_KIND: Final = {"right": "good", "right in part": "unclear", "wrong": "bad", "not judged": "unclear"}
_SIGN: Final = {
    "ok": "good",
    "right": "good",
    "right in part": "open",
    "wrong": "bad",
    "not judged": "open",
    "note": "none",
}
_MARK: Final = {"ok": "✓", "right": "✓", "right in part": "◐", "wrong": "✗", "not judged": "?", "note": "i"}


@dataclass(frozen=True)
class TrainingSection:
    """What the page says of one training."""

    answer: Answer
    sentence: str
    line: str
    wrong: Finding | None
    notes: list[str]
    lines: list[Line]
    coverage: list[str]
    uncovered: list[tuple[str, str, tuple[str, ...]]]


def verdict_page(checked: CheckedCommand, verdict: Verdict) -> str:
    """Return the whole page."""
    return (
        _environment()
        .get_template("check.html.jinja")
        .render(
            verdict=verdict,
            command=shlex.join(checked.command),
            script=script_end(checked),
            seconds=durations(checked),
            plumbline=plumbline_version(),
            trainings=list(_sections(checked)),
            kind=_KIND,
            sign=_SIGN,
            mark=_MARK,
            place_and_size=place_and_size,
        )
    )


def _sections(checked: CheckedCommand) -> Iterator[TrainingSection]:
    for one in checked.trainings:
        yield _section(one, checked.options.truth)


def _section(one: CheckedTraining, truth: str) -> TrainingSection:
    return TrainingSection(
        answer_of(one),
        sentence_on(one),
        training_line(one),
        next(accusations(one), None),
        notes_on(one),
        lines_of(one),
        list(coverage_lines(one.coverage, truth)),
        [
            (what, group.why, group.names)
            for what, share in (
                ("gradient not judged", one.coverage.gradients),
                ("update not judged", one.coverage.updates),
                ("gradient not computed again", one.coverage.replays),
            )
            for group in share.left_out
        ],
    )


@cache
def _environment() -> Environment:
    return page_environment("plumbline.check.report")
