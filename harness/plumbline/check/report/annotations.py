"""What is wrong with a training, at the line of the script in which its first step was taken."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.check.command.command import CheckedCommand
from plumbline.check.judge.judging import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import Answer, Verdict, accusations
from plumbline.core.finding import Finding, is_unexplained
from plumbline.report.annotations.annotation import Annotation
from plumbline.report.annotations.sarif import sarif
from plumbline.report.text import digits
from plumbline.results.records import SourceLine


def annotations_on(checked: CheckedCommand) -> list[Annotation]:
    """Return what is wrong in each training; what follows from something else is left out."""
    return [
        _annotation(one, finding)
        for one in checked.trainings
        for finding in accusations(one)
        if finding.consequence_of is None
    ]


def check_sarif(checked: CheckedCommand, verdict: Verdict) -> str:
    """Return the verdict as SARIF."""
    about = {"command": list(checked.command), "verdict": verdict.answer.value, "sentence": verdict.sentence}
    return sarif(annotations_on(checked), succeeded=verdict.answer is not Answer.NOT_JUDGED, properties=about)


def _annotation(one: CheckedTraining, finding: Finding) -> Annotation:
    place = describe(one.training).steps_at
    rule = finding.check if is_unexplained(finding) else str(finding.cause)
    return Annotation(
        rule=rule,
        title=f"{finding.check}: {rule.replace('-', ' ')}",
        message="\n".join(_lines(finding)),
        key=f"{finding.check}/{rule}",
        source=place and SourceLine(file=place[0], line=place[1]),
        details={
            "family": finding.family,
            "check": finding.check,
            "step": finding.step,
            "rank": finding.rank,
            "parameter": finding.parameter,
        },
    )


def _lines(finding: Finding) -> Iterator[str]:
    yield finding.message
    where = {"step": finding.step, "rank": finding.rank, "parameter": finding.parameter}
    named = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    noise = None if finding.error_x_noise is None else f"{digits(finding.error_x_noise)} × rounding noise"
    if noise or named:
        yield f"{noise or 'first'}{f' at {named}' if named else ''}"
