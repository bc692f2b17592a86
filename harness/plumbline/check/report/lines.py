"""Text that all forms of the verdict share: a line for each finding, the training in words, and what was not judged.

The verdict as Markdown is for the summary of a CI job, an annotation of a build, or a comment. An annotation puts what
is wrong at the line of the script that takes the first optimizer step.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.command.running import EndedBy
from plumbline.check.judge.coverage import NO_REPLAY, Coverage, Share, Uncovered
from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import (
    ENOUGH,
    Answer,
    Verdict,
    accusations,
    answer_of,
    is_accusation,
    notes_on,
    sentence_on,
)
from plumbline.core.errors import TROUBLE
from plumbline.core.finding import Finding, is_unexplained
from plumbline.core.numbers import counted, x_noise
from plumbline.core.outcome import Outcome
from plumbline.core.titles import heading, title_of
from plumbline.judge.findings import Information
from plumbline.report.annotations import Annotation, annotate, sarif
from plumbline.report.text import (
    in_words,
    listed,
    location,
    markdown,
    markdown_code,
    markdown_table,
    percent,
    settings_in_words,
    shortened,
)

MOST_NAMES = 3


class Sign(str, Enum):
    """The kind of result that a check has. The value is shown to the user."""

    WRONG = "wrong"
    RIGHT = "ok"
    INFORMATION = "note"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Line:
    """The result of a check, with its reason."""

    sign: Sign
    check: str
    text: str
    finding: Finding


def lines_of(one: CheckedTraining, above: Collection[Finding] = ()) -> list[Line]:
    """Return a line for each finding, except headline notes, findings shown ``above``, and the first accusation.

    If a check found a mistake, its passing findings are left out.
    """
    told = [*above, *islice(accusations(one), 1)]
    accused = {each.check for each in accusations(one)}
    lines = [
        _line(each, one.coverage)
        for each in one.findings
        if not any(each is other for other in told) and not isinstance(each, HeadlineNote)
    ]
    return [line for line in lines if line.sign is not Sign.RIGHT or line.check not in accused]


def _line(finding: Finding, coverage: Coverage) -> Line:
    text = finding.message.removeprefix("not judged: ")
    sign = _sign(finding)
    if sign is Sign.RIGHT and finding.check == "update" and coverage.updates.part < ENOUGH:
        text = f"{percent(coverage.updates.part)} judged: {text}"
    if finding.error_x_noise is not None and "× noise" not in text:
        text += f" ({x_noise(finding.error_x_noise)})"
    if is_accusation(finding) and finding.consequence_of is not None:
        text = f"consequence of {finding.consequence_of}: {text}"
    return Line(sign, finding.check, _sentences(text) if sign is Sign.INFORMATION else text, finding)


def _sentences(text: str) -> str:
    return heading(text) if text.endswith((".", "!", "?")) else f"{heading(text)}."


def _sign(finding: Finding) -> Sign:
    if is_accusation(finding):
        return Sign.WRONG
    if finding.outcome is Outcome.PASSED:
        return Sign.INFORMATION if isinstance(finding, Information) else Sign.RIGHT
    return Sign.NOT_JUDGED


def training_line(one: CheckedTraining) -> str:
    what = describe(one.training)
    low, high = what.passes
    optimizers = [
        name if what.optimizers.count(name) == 1 else f"{what.optimizers.count(name)} × {name}"
        for name in dict.fromkeys(what.optimizers)
    ]
    parts = [
        counted(what.ranks, "rank"),
        counted(what.steps, "step"),
        (f"{low}" if low == high else f"{low} to {high}") + f" backward pass{'es' if high != 1 else ''} per step",
        ", ".join(optimizers),
        ", ".join(what.precision),
        ", ".join(what.wrappers),
    ]
    return " · ".join(filter(None, parts))


def coverage_lines(coverage: Coverage, truth: str) -> Iterator[str]:
    """Yield what share of the trainable parameters was judged, and what was not judged for which reason.

    ``truth`` is the precision in which each rank replays its own calls.
    """
    gradients, updates, replays = coverage.gradients, coverage.updates, coverage.replays
    yield (
        f"judged: {percent(gradients.part)} of gradients and {percent(updates.part)} of updates, of "
        f"{coverage.entries:,} trainable entries"
    )
    if replays.entries:
        precision = "float64" if coverage.is_joint else truth
        whose = "by all ranks together" if coverage.is_joint else "on each rank"
        when = ", in the first step of each kind" if coverage.repeats and not coverage.is_joint else ""
        yield f"recomputed in {precision} {whose}{when}: {percent(replays.part)} of the backward passes' gradients"
    elif gradients.entries:
        yield "gradients were compared with those of the script's own backward passes"
    for what, share in (("gradients", gradients), ("updates", updates)):
        for one in share.left_out:
            yield f"{what} not judged: {_left_out(one, share)}"
    unseen = {name for one in gradients.left_out for name in one.names}
    for one in replays.left_out:
        if not unseen.issuperset(one.names) and one.why != NO_REPLAY:
            yield f"not recomputed: {_left_out(one, replays)}"


def _left_out(one: Uncovered, share: Share) -> str:
    return f"{percent(one.entries / share.of)}, {listed(one.names, MOST_NAMES)}: {one.why}"


def ran(checked: CheckedCommand) -> str:
    return f"{shortened(shlex.join(checked.command), 300)}: {script_end(checked)}, {durations(checked)}"


def script_end(checked: CheckedCommand) -> str:
    """Return how the script ended, for example ``exit code 0``."""
    end = checked.end
    was_ended = (
        checked.trainings and checked.options.stop and any(one.torch and not one.ended for one in checked.processes)
    )
    stopped = was_ended and end.by is EndedBy.ITSELF and end.exit_code == 0
    return end.in_words + (" (ended by Plumbline after the recorded steps)" if stopped else "")


def durations(checked: CheckedCommand) -> str:
    ran = f"ran {in_words(checked.end.seconds, 's')}"
    return f"{ran}, judged in {in_words(checked.judging_s, 's')}" if checked.trainings else ran


def annotations_on(checked: CheckedCommand) -> list[Annotation]:
    """Return the mistakes of each training as annotations. Consequences of other mistakes are left out."""
    return [
        _annotation(one, finding)
        for one in checked.trainings
        for finding in accusations(one)
        if finding.consequence_of is None
    ]


def unjudged_annotation(verdict: Verdict) -> list[Annotation]:
    """Return an annotation without a place if a job fails although nothing is wrong; none otherwise."""
    if verdict.exit_code != TROUBLE:
        return []
    step = f"\nWhat to do: {verdict.next_step}" if verdict.next_step else ""
    answer = verdict.answer.value
    return [Annotation(answer.replace(" ", "-"), f"plumbline check: {answer}", f"{verdict.sentence}{step}", answer)]


def check_sarif(checked: CheckedCommand, verdict: Verdict) -> str:
    about = {"command": list(checked.command), "verdict": verdict.answer.value, "sentence": verdict.sentence}
    return sarif(annotations_on(checked), succeeded=verdict.answer is not Answer.NOT_JUDGED, properties=about)


def _annotation(one: CheckedTraining, finding: Finding) -> Annotation:
    rule = finding.check if is_unexplained(finding) else str(finding.cause)
    return annotate(
        finding,
        finding.message,
        rule=rule,
        title=f"{finding.check}: {title_of(rule)}",
        key=f"{finding.check}/{rule}",
        source=describe(one.training).steps_at,
    )


_MARK = {Answer.RIGHT: "✅", Answer.RIGHT_IN_PART: "⚠️", Answer.NOT_JUDGED: "⚠️", Answer.WRONG: "❌"}


def verdict_markdown(checked: CheckedCommand, verdict: Verdict) -> str:
    blocks = [
        f"### {_markdown_headline(verdict.answer, verdict.sentence)}",
        *(f"**{markdown(incident)}**" for incident in verdict.incidents),
        *([f"What to do: {markdown(verdict.next_step)}"] if verdict.next_step else []),
    ]
    for index, one in enumerate(checked.trainings, 1):
        if len(checked.trainings) > 1:
            blocks.append(f"#### Training {index}: {_markdown_headline(answer_of(one), sentence_on(one))}")
        blocks += _markdown_of(one, checked.options.truth)
    blocks.append(f"{markdown_code(shlex.join(checked.command))}: {script_end(checked)}, {durations(checked)}")
    if checked.settings:
        blocks.append(markdown(settings_in_words(checked.settings)))
    return "\n\n".join(blocks) + "\n"


def _markdown_headline(answer: Answer, sentence: str) -> str:
    return f"{_MARK[answer]} {answer.value.upper()}: {markdown(sentence)}"


def _markdown_of(one: CheckedTraining, truth: str) -> Iterator[str]:
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
        yield _markdown_rows(also)
    others = [line for line in lines if line.sign is not Sign.WRONG]
    if others:
        yield f"<details><summary>Other checks</summary>\n\n{_markdown_rows(others)}\n\n</details>"
    facts = [training_line(one), *coverage_lines(one.coverage, truth)]
    if steps_at := describe(one.training).steps_at:
        facts.append(f"the first step was taken in {steps_at[0]}, line {steps_at[1]}")
    yield "\n".join(f"- {markdown(text)}" for text in facts)


def _markdown_rows(lines: Iterable[Line]) -> str:
    rows = ([line.sign.value, markdown(line.check), markdown(line.text)] for line in lines)
    return markdown_table(["answer", "check", "what was observed"], "lll", rows)
