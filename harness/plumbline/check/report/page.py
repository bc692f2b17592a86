"""The verdict as a page: one file that works offline and without scripts, in the form of a run's page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from typing import Final

from jinja2 import Environment

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.judge.coverage import Coverage
from plumbline.check.report.lines import coverage_lines, durations, lines_of, script_end, training_line
from plumbline.check.verdict.verdict import Verdict, accusations, answer_of, notes_on, sentence_on
from plumbline.machine.software import plumbline_version
from plumbline.report.html.environment import page_environment
from plumbline.report.text import place_and_size, settings_in_words

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


def _uncovered(coverage: Coverage) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    shares = {
        "gradient not judged": coverage.gradients,
        "update not judged": coverage.updates,
        "gradient not computed again": coverage.replays,
    }
    for what, share in shares.items():
        yield from ((what, group.why, group.names) for group in share.left_out)


@cache
def _environment() -> Environment:
    environment = page_environment("plumbline.check.report")
    environment.globals |= {
        "accusations": accusations,
        "answer_of": answer_of,
        "coverage_lines": coverage_lines,
        "kind": _KIND,
        "lines_of": lines_of,
        "mark": _MARK,
        "notes_on": notes_on,
        "place_and_size": place_and_size,
        "sentence_on": sentence_on,
        "sign": _SIGN,
        "training_line": training_line,
        "uncovered": _uncovered,
    }
    return environment
