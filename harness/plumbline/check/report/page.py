"""The verdict as one HTML file that works offline and without scripts, in the style of a run's page."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.judge.coverage import Coverage
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.report.lines import coverage_lines, durations, lines_of, script_end, training_line
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import Verdict, answer_of, mistakes, notes_on, sentence_on
from plumbline.core.finding import Finding, is_unexplained
from plumbline.core.titles import heading, title_of, unexplained_title
from plumbline.machine.software import plumbline_version
from plumbline.report.html.environment import page_environment
from plumbline.report.text import place_and_size, settings_in_words, without_hint

LINES_AROUND: Final = 4

_KIND: Final = {"right": "good", "right in part": "partly", "wrong": "bad", "not judged": "unclear"}
_SIGN: Final = {
    "ok": "good",
    "right": "good",
    "right in part": "contract",
    "wrong": "bad",
    "not judged": "open",
    "note": "none",
}
_MARK: Final = {"ok": "✓", "right": "✓", "right in part": "◐", "wrong": "✗", "not judged": "?", "note": "i"}


def verdict_page(checked: CheckedCommand, verdict: Verdict) -> str:
    return (
        _environment()
        .get_template("check.html.jinja")
        .render(
            verdict=verdict,
            command=shlex.join(checked.command),
            script=script_end(checked),
            settings=settings_in_words(checked.settings),
            seconds=durations(checked),
            plumbline=plumbline_version(),
            trainings=checked.trainings,
            truth=checked.options.truth,
        )
    )


@dataclass(frozen=True)
class SourceLines:
    """Where a script takes its first step: the file, the line, and the lines around it with their numbers."""

    file: str
    number: int
    text: tuple[tuple[int, str], ...]


def _source_of(one: CheckedTraining) -> SourceLines | None:
    """Return the lines of the script around its first step; None if a library took it."""
    place = describe(one.training).steps_at
    if place is None:
        return None
    file, number = place
    try:
        lines = Path(file).read_text("utf-8", "replace").splitlines()
    except OSError:  # the script is on another machine, or is gone
        lines = []
    shown = range(max(number - LINES_AROUND, 1), min(number + LINES_AROUND, len(lines)) + 1)
    text = textwrap.dedent("\n".join(lines[each - 1] for each in shown)).split("\n")
    return SourceLines(Path(file).name, number, tuple(zip(shown, text, strict=False)))


def _name_of(finding: Finding) -> str:
    if is_unexplained(finding):
        return heading(unexplained_title(finding.check))
    return heading(title_of(str(finding.cause)))


def _uncovered(coverage: Coverage) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    shares = {
        "gradient not judged": coverage.gradients,
        "update not judged": coverage.updates,
        "gradient not recomputed": coverage.replays,
    }
    for what, share in shares.items():
        yield from ((what, group.why, group.names) for group in share.left_out)


@cache
def _environment() -> Environment:
    environment = page_environment("plumbline.check.report")
    environment.globals |= {
        "answer_of": answer_of,
        "coverage_lines": coverage_lines,
        "kind": _KIND,
        "lines_of": lines_of,
        "mark": _MARK,
        "mistakes": mistakes,
        "notes_on": notes_on,
        "sentence_on": sentence_on,
        "sign": _SIGN,
        "source_of": _source_of,
        "training_line": training_line,
        "uncovered": _uncovered,
    }
    environment.filters |= {"name_of": _name_of, "place_and_size": place_and_size, "without_hint": without_hint}
    return environment
