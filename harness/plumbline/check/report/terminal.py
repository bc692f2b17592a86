"""The verdict on one screen, as plain text. No terminal library is needed."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.judge.estimate import estimate_lines
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.report.lines import Line, Sign, coverage_lines, lines_of, ran, training_line
from plumbline.check.verdict.obstacles import why_no_estimate
from plumbline.check.verdict.verdict import (
    MOST_MISTAKES,
    Answer,
    Verdict,
    answer_of,
    mistakes,
    next_step,
    next_step_after,
    notes_on,
    sentence_on,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.report.text import location, printable, settings_in_words, shortened

LONGEST_MESSAGE = 180
"""Most characters of a passing check's message. The page and the JSON file have the whole message."""

LEAST_WIDTH = 20
"""Least number of columns for wrapped text, however narrow the terminal is."""

_CODES: Final = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
"""Parameters of the terminal sequence that sets a style (ECMA-48, SGR)."""

_COLOURS: Final = {
    Answer.RIGHT: "green",
    Answer.RIGHT_IN_PART: "yellow",
    Answer.NOT_JUDGED: "yellow",
    Answer.WRONG: "red",
}
_SIGN_STYLES: Final = {Sign.RIGHT: "green", Sign.WRONG: "bold red", Sign.INFORMATION: "cyan", Sign.NOT_JUDGED: "yellow"}


def verdict_screen(
    checked: CheckedCommand, verdict: Verdict, *, width: int = 80, colour: bool = False, quiet: bool = False
) -> str:
    """Return the screen in lines of at most ``width``. If ``quiet`` and all is right, return one line of any length."""
    if quiet and verdict.answer is Answer.RIGHT and not verdict.incidents:
        screen = _Screen(sys.maxsize, colour)
        notes = sum(len(notes_on(one)) for one in checked.trainings)
        also = f"; {counted(notes, 'note')} hidden by --quiet" if notes else ""
        screen.headline(verdict.answer, f"{verdict.sentence}{also}")
        return screen.text
    screen = _Screen(width, colour)
    screen.verdict(verdict.answer, verdict.sentence, verdict.incidents, verdict.next_step)
    screen.trainings(checked.trainings, checked.options.truth)
    return screen.ended(checked)


def trainings_screen(trainings: Sequence[CheckedTraining], answer: Answer, sentence: str, obstacle: str) -> str:
    """Return the screen for trainings that no command started. ``obstacle`` says what went wrong, if anything did."""
    screen = _Screen(80, colour=False)
    step = next_step_after(answer, sentence, trainings)
    screen.verdict(answer, sentence, [obstacle] if obstacle else [], step)
    screen.trainings(trainings, RecordingOptions().truth)
    return screen.text


def dry_run_screen(checked: CheckedCommand, steps: int, *, width: int = 80, colour: bool = False) -> str:
    """Return what recording ``steps`` steps will cost, or why that is not known."""
    screen = _Screen(width, colour)
    why = why_no_estimate(checked)
    if why is not None:
        screen.wrapped(f"DRY RUN: {why}")
        screen.what_to_do(next_step(why, ()))
    for estimate in (one.estimate for one in checked.trainings if one.estimate is not None):
        first, *others = estimate_lines(estimate, steps)
        screen.wrapped(f"DRY RUN: {first}", "bold")
        for line in others:
            screen.indented(line)
    return screen.ended(checked)


class _Screen:
    """Lines of a screen, wrapped and styled as they are added."""

    def __init__(self, width: int, colour: bool) -> None:
        self._width = width
        self._colour = colour
        self._lines: list[str] = []

    def blank(self) -> None:
        self._lines.append("")

    def wrapped(self, text: str, style: str = "", indent: str = "") -> None:
        self._lines += [indent + self._styled(line, style) for line in self._wrap(text, len(indent))]

    def indented(self, text: str, style: str = "") -> None:
        self.wrapped(text, style, "  ")

    def headline(self, answer: Answer, sentence: str, before: str = "") -> None:
        word = answer.value.upper()
        first, *others = self._wrap(f"{before}{word}: {sentence}")
        before, found, after = first.partition(word)
        self._lines.append(before + self._styled(found, f"bold {_COLOURS[answer]}") + self._styled(after, "bold"))
        self._lines += [self._styled(line, "bold") for line in others]

    def verdict(self, answer: Answer, sentence: str, incidents: Sequence[str], step: str) -> None:
        self.headline(answer, sentence)
        for incident in incidents:
            self.indented(f"! {incident}", "yellow")
        self.what_to_do(step)

    def what_to_do(self, step: str) -> None:
        if step:
            self.indented(f"What to do: {step}", "cyan")

    def trainings(self, trainings: Sequence[CheckedTraining], truth: str) -> None:
        for index, one in enumerate(trainings, 1):
            if len(trainings) > 1:
                self.blank()
                self.headline(answer_of(one), sentence_on(one), f"training {index}: ")
            _show_training(self, one, truth)

    def questions(self, lines: list[Line]) -> None:
        signs = max(len(line.sign.value) for line in lines) + 2
        checks = max(len(printable(line.check)) for line in lines) + 2
        for line in lines:
            text = shortened(line.text, LONGEST_MESSAGE) if line.sign is Sign.RIGHT else line.text
            begin = self._styled(line.sign.value, _SIGN_STYLES[line.sign]) + " " * (signs - len(line.sign.value))
            begin += f"{printable(line.check):{checks}}"
            for part in self._wrap(text, 2 + signs + checks):
                self._lines.append(f"  {begin}{part}".rstrip())
                begin = " " * (signs + checks)

    def ended(self, checked: CheckedCommand) -> str:
        """Return the whole screen. Its last lines say how the command ended."""
        self.blank()
        self.indented(ran(checked), "dim")
        if checked.settings:
            self.indented(settings_in_words(checked.settings), "dim")
        return self.text

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def _wrap(self, text: str, indent: int = 0) -> list[str]:
        width = max(self._width - indent, LEAST_WIDTH)
        return textwrap.wrap(printable(text), width, break_on_hyphens=False) or [""]

    def _styled(self, text: str, style: str) -> str:
        if not (self._colour and style and text):
            return text
        return f"\x1b[{';'.join(str(_CODES[name]) for name in style.split())}m{text}\x1b[0m"


def _show_training(screen: _Screen, one: CheckedTraining, truth: str) -> None:
    shown = mistakes(one)[:MOST_MISTAKES]
    for wrong in shown:
        _show_mistake(screen, wrong, is_one_of_several=len(shown) > 1)
    for note in notes_on(one):
        screen.indented(f"Note: {note}", "cyan")
    if lines := lines_of(one, shown):
        screen.blank()
        screen.questions(lines)
    screen.blank()
    for line in (training_line(one), *coverage_lines(one.coverage, truth)):
        screen.indented(line)


def _show_mistake(screen: _Screen, wrong: Finding, *, is_one_of_several: bool) -> None:
    place = ", ".join(location(wrong))
    where = f"first at {place}" if wrong.step is not None else place
    if is_one_of_several:
        where = f"{wrong.check}: {where}" if where else wrong.check
    if where:
        screen.indented(where, "bold")
    screen.indented(wrong.message)
