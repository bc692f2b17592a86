"""The verdict on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plumbline.check.command.command import CheckedCommand
from plumbline.check.judge.estimate import estimate_lines
from plumbline.check.judge.judging import CheckedTraining
from plumbline.check.report.lines import Line, Sign, coverage_lines, lines_of, ran, training_line
from plumbline.check.verdict.notes import notes_on
from plumbline.check.verdict.obstacles import why_no_estimate
from plumbline.check.verdict.verdict import Answer, Verdict, accusations, answer_of, sentence_on
from plumbline.core.finding import Finding
from plumbline.report.terminal.console import rendered
from plumbline.report.text import printable, shortened

LONGEST_MESSAGE = 180
"""Characters of a line that says that something is right; the page and the JSON file have all of it."""

_STYLES = {
    Answer.RIGHT: "bold green",
    Answer.RIGHT_IN_PART: "bold yellow",
    Answer.NOT_JUDGED: "bold yellow",
    Answer.WRONG: "bold red",
}
_SIGN_STYLES = {Sign.RIGHT: "green", Sign.WRONG: "bold red", Sign.INFORMATION: "cyan", Sign.NOT_JUDGED: "yellow"}


def verdict_screen(checked: CheckedCommand, verdict: Verdict, *, width: int = 80, colour: bool = False) -> str:
    """Return the screen, in lines of at most ``width``."""
    parts: list[RenderableType] = [_headline(verdict.answer, verdict.sentence)]
    parts += [_indented(f"! {one}", "yellow") for one in verdict.incidents]
    several = len(checked.trainings) > 1
    for place, one in enumerate(checked.trainings):
        if several:
            answer = answer_of(one)
            parts += [Text(), _headline(answer, sentence_on(one), f"training {place + 1}: ")]
        parts += _training(one, checked.options.truth)
    parts += [Text(), _indented(ran(checked), "dim")]
    return rendered(*parts, width=width, colour=colour)


def dry_run_screen(checked: CheckedCommand, steps: int, *, width: int = 80, colour: bool = False) -> str:
    """Return what recording ``steps`` steps will cost, or why that is not known."""
    parts: list[RenderableType] = []
    for one in checked.trainings:
        if one.estimate is not None:
            first, *others = estimate_lines(one.estimate, steps)
            parts += [Text.assemble("DRY RUN: ", (first, "bold"), overflow="fold"), *map(_indented, others)]
    if (why := why_no_estimate(checked)) is not None:
        parts = [Text.assemble("DRY RUN: ", why)]
    return rendered(*parts, Text(), _indented(ran(checked), "dim"), width=width, colour=colour)


def _headline(answer: Answer, sentence: str, before: str = "") -> Text:
    line = Text.assemble(before, (answer.value.upper(), _STYLES[answer]), ": ", overflow="fold")
    return line.append(printable(sentence), style="bold")


def _training(one: CheckedTraining, truth: str) -> Iterator[RenderableType]:
    wrong = next(accusations(one), None)
    if wrong is not None:
        yield _first(wrong)
    for note in notes_on(one):
        yield _indented(f"Note: {note}", "cyan")
    if lines := lines_of(one):
        yield Text()
        yield _questions(lines)
    yield Text()
    yield _indented(training_line(one))
    for line in coverage_lines(one.coverage, truth):
        yield _indented(line)


def _first(wrong: Finding) -> RenderableType:
    where = {"step": wrong.step, "rank": wrong.rank, "parameter": wrong.parameter}
    place = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    lines = [Text(printable(f"first at {place}" if wrong.step is not None else place), style="bold")] if place else []
    return Padding(Group(*lines, Text(printable(wrong.message), overflow="fold")), (0, 0, 0, 2))


def _questions(lines: list[Line]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for line in lines:
        text = shortened(line.text, LONGEST_MESSAGE) if line.sign is Sign.RIGHT else line.text
        table.add_row(
            Text(line.sign.value, style=_SIGN_STYLES[line.sign]), Text(printable(line.check)), Text(printable(text))
        )
    return Padding(table, (0, 0, 0, 2))


def _indented(text: str, style: str = "") -> RenderableType:
    return Padding(Text(printable(text), style=style, overflow="fold"), (0, 0, 0, 2))
