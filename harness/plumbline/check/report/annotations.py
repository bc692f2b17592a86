"""Annotates the line of the script that takes the first optimizer step with what is wrong in the training."""

from __future__ import annotations

from plumbline.check.command.checked_command import CheckedCommand
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.verdict import Answer, Verdict, accusations
from plumbline.core.finding import Finding, is_unexplained
from plumbline.report.annotations import Annotation, annotate, sarif


def annotations_on(checked: CheckedCommand) -> list[Annotation]:
    """Return the mistakes of each training as annotations. Consequences of other mistakes are left out."""
    return [
        _annotation(one, finding)
        for one in checked.trainings
        for finding in accusations(one)
        if finding.consequence_of is None
    ]


def check_sarif(checked: CheckedCommand, verdict: Verdict) -> str:
    about = {"command": list(checked.command), "verdict": verdict.answer.value, "sentence": verdict.sentence}
    return sarif(annotations_on(checked), succeeded=verdict.answer is not Answer.NOT_JUDGED, properties=about)


def _annotation(one: CheckedTraining, finding: Finding) -> Annotation:
    rule = finding.check if is_unexplained(finding) else str(finding.cause)
    return annotate(
        finding,
        finding.message,
        rule=rule,
        title=f"{finding.check}: {rule.replace('-', ' ')}",
        key=f"{finding.check}/{rule}",
        source=describe(one.training).steps_at,
    )
