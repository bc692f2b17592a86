"""The verdict as Markdown: for the summary of a CI job, an annotation of a build, or a comment."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.report.lines import Line, Sign, coverage_lines, durations, lines_of, script_end, training_line
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import Answer, Verdict, accusations, answer_of, notes_on, sentence_on
from plumbline.report.text import location, markdown, markdown_code, markdown_table, settings_in_words

_MARK = {Answer.RIGHT: "✅", Answer.RIGHT_IN_PART: "⚠️", Answer.NOT_JUDGED: "⚠️", Answer.WRONG: "❌"}


def verdict_markdown(checked: CheckedCommand, verdict: Verdict) -> str:
    blocks = [
        f"### {_headline(verdict.answer, verdict.sentence)}",
        *(f"**{markdown(incident)}**" for incident in verdict.incidents),
        *([f"What to do: {markdown(verdict.next_step)}"] if verdict.next_step else []),
    ]
    for index, one in enumerate(checked.trainings, 1):
        if len(checked.trainings) > 1:
            blocks.append(f"#### Training {index}: {_headline(answer_of(one), sentence_on(one))}")
        blocks += _training(one, checked.options.truth)
    blocks.append(f"{markdown_code(shlex.join(checked.command))}: {script_end(checked)}, {durations(checked)}")
    if checked.settings:
        blocks.append(markdown(settings_in_words(checked.settings)))
    return "\n\n".join(blocks) + "\n"


def _headline(answer: Answer, sentence: str) -> str:
    return f"{_MARK[answer]} {answer.value.upper()}: {markdown(sentence)}"


def _training(one: CheckedTraining, truth: str) -> Iterator[str]:
    wrong = next(accusations(one), None)
    if wrong is not None:
        if place := ", ".join(location(wrong)):
            yield f"**{'first at ' if wrong.step is not None else ''}{markdown(place)}**"
        yield markdown(wrong.message)
    for note in notes_on(one):
        yield f"> Note: {markdown(note)}"
    lines = lines_of(one)
    also = [line for line in lines if line.sign is Sign.WRONG]
    if also:
        yield _table(also)
    others = [line for line in lines if line.sign is not Sign.WRONG]
    if others:
        yield f"<details><summary>Other checks</summary>\n\n{_table(others)}\n\n</details>"
    facts = [training_line(one), *coverage_lines(one.coverage, truth)]
    if steps_at := describe(one.training).steps_at:
        facts.append(f"the first step was taken in {steps_at[0]}, line {steps_at[1]}")
    yield "\n".join(f"- {markdown(text)}" for text in facts)


def _table(lines: Iterable[Line]) -> str:
    rows = ([line.sign.value, markdown(line.check), markdown(line.text)] for line in lines)
    return markdown_table(["answer", "check", "what was observed"], "lll", rows)
