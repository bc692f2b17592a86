"""One root cause in plain words: what was observed, where, how large, how sure, what to look at, and what it hits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plumbline.core.finding import UNEXPLAINED
from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import cached_per_run
from plumbline.report.tables.failures import FailureGroup, failures, message_of, wrong_cells
from plumbline.report.text import compact, counted, listed, location, x_noise
from plumbline.results.records import Result, grouped
from plumbline.results.run import Run

MOST_NAMES: Final = 4

_ADVICE: Final = {
    Outcome.FAILED: "No known mistake explains this. The errors of single parameters and steps show where it begins.",
    Outcome.ERRORED: "Read the message, then the rank's log below the cell.",
    Outcome.CRASHED: "Read the last lines of the ranks' logs below the cell, beginning with the first rank that ended.",
    Outcome.TIMED_OUT: "Look for a collective that not all ranks call: the ranks' logs show where each one waits.",
}


@dataclass(frozen=True)
class Diagnosis:
    """A group of failures as a page shows it. ``finding`` is its example, whose command repeats it.

    ``right`` is the same check in a cell of the same problem in which nothing is wrong, None where there is none.
    """

    group: FailureGroup
    title: str
    observed: str
    where: tuple[str, ...]
    size: str
    certainty: str
    advice: str
    extent: str
    right: Result | None

    @property
    def finding(self) -> Result:
        return self.group.findings[0]


@cached_per_run
def diagnoses(run: Run) -> list[Diagnosis]:
    wrong = {findings[0].coordinates for findings in wrong_cells(run)}
    drawn = (one for one in run.results if one.error_grid is not None and one.coordinates not in wrong)
    right = grouped((one for one in drawn if one.outcome in (Outcome.PASSED, Outcome.DEVIATES)), _problem)
    return [_diagnosis(group, right.get(_problem(group.findings[0]), ())) for group in failures(run)]


def _diagnosis(group: FailureGroup, right: Iterable[Result]) -> Diagnosis:
    finding, found = group.findings[0], group.findings
    title = group.title if ":" in group.title else group.title.replace("-", " ")
    layer = (finding.parameter or "").rpartition(".")[0]
    is_named = finding.cause not in (None, UNEXPLAINED) and finding.outcome is Outcome.FAILED
    advice = "" if is_named else _ADVICE.get(finding.outcome, "")
    if finding.hint or finding.is_unexpectedly_good:
        advice = finding.hint or "Remove the expectation."
    kinds = (
        [one.workload for one in found],
        [one.backend for one in found],
        [f"{one.num_nodes}×{one.gpus}" for one in found],
        [one.precision for one in found],
    )
    extent = " · ".join(listed(dict.fromkeys(kind), MOST_NAMES) for kind in kinds)

    def likeness(one: Result) -> tuple[bool, ...]:
        place, own = one.coordinates, finding.coordinates
        same = ("precision", "topology", "backend", "subject")
        return tuple(getattr(place, name) == getattr(own, name) for name in same)

    return Diagnosis(
        group,
        title[:1].upper() + title[1:],
        observed(finding),
        (*location(finding), *([f"layer {layer}"] if layer else [])),
        size(finding),
        certainty(finding),
        advice,
        f"{counted(len(found), 'cell')}: {extent}",
        max(right, key=likeness, default=None) if finding.error_grid is not None else None,
    )


def observed(finding: Result) -> str:
    message = message_of(finding)
    for sign in (": ", "; "):
        head, found, tail = message.rpartition(f"{sign}{finding.hint}") if finding.hint else ("", "", "")
        if found:
            return head + tail
    return message


def size(finding: Result) -> str:
    if finding.error_x_noise is None:
        return ""
    limit = finding.limit_x_noise
    allowed = (
        "" if limit is None else f"; a correct trainer stays below {compact(limit)}" if limit else "; it must be 0"
    )
    return f"{x_noise(finding.error_x_noise)}{allowed}"


def certainty(finding: Result) -> str:
    if finding.is_unexpectedly_good:
        return "Certain: this check was expected to fail, and passed."
    sentences = []
    error, limit = finding.error_x_noise, finding.limit_x_noise
    if error is not None and limit:
        sentences.append(f"The error is {compact(error / limit)} × the limit.")
    elif error is not None and limit == 0:
        sentences.append("The numbers are exact, so any difference is an error.")
    elif finding.outcome is Outcome.FAILED:
        sentences.append("Counted or compared bit for bit: rounding plays no role.")
    else:
        sentences.append("It ended before its numbers could be checked.")
    if finding.cause_x_noise is not None:
        sentences.append(f"The cause predicts the recorded numbers within {x_noise(finding.cause_x_noise)}.")
    elif finding.cause not in (None, UNEXPLAINED):
        sentences.append("The cause explains all that was recorded.")
    elif finding.outcome is Outcome.FAILED:
        sentences.append("It is certainly wrong, but the cause is unknown.")
    return " ".join(sentences)


def _problem(finding: Result) -> tuple[str, str]:
    return finding.check, finding.workload
