"""What went wrong in a run: grouped by cause, summarised by subject, and each root cause in plain words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plumbline.core.finding import UNEXPLAINED, as_rows, by_themselves, in_reading_order, is_unexplained
from plumbline.core.numbers import compact, counted, x_noise
from plumbline.core.outcome import Outcome
from plumbline.core.titles import heading, title_of, unexplained_title
from plumbline.report.tables.cells import cached_per_run
from plumbline.report.text import listed, location, printable, shortened, without_hint
from plumbline.results.records import UNEXPECTED_PASS, Coordinates, Expected, Result, by_cell, grouped
from plumbline.results.run import Run

LONGEST_CONSEQUENCE: Final = 160
LONGEST_EXAMPLE: Final = 1000
"""Characters of the example finding in a run's summary. Plumbline's own messages are shorter, exceptions may not be."""
LONGEST_MESSAGE: Final = 200
LONGEST_PARAMETER: Final = 48
MOST_CELLS: Final = 3
MOST_ROWS: Final = 16
Cause = tuple[str, str | None]  # a cause and its family


@dataclass(frozen=True)
class FailureGroup:
    """Cells of one subject that went wrong for the same reason, with the finding of each cell that shows it.

    ``title`` is the cause's name, or the outcome and the check if no cause was found. ``family`` is the cause's family,
    None without a cause. ``mechanism`` distinguishes failures without a cause by their messages, for example by the
    first line of an exception. A cell with several mistakes is in several groups.
    """

    subject: str
    title: str
    family: str | None
    mechanism: str
    findings: tuple[Result, ...]

    @property
    def is_mistake(self) -> bool:
        """Whether the trainer computed something wrong, rather than ending without a verdict."""
        return self.findings[0].outcome is Outcome.FAILED and not self.findings[0].is_unexpectedly_good

    @property
    def in_words(self) -> str:
        finding = self.findings[0]
        if not is_unexplained(finding):
            return title_of(self.title)
        return unexplained_title(finding.check) if self.is_mistake else self.title


def is_wrong(result: Result) -> bool:
    """Return whether a finding needs action: it is bad and not known to be, or it passed although it should fail."""
    return result.is_unexpectedly_good or (result.outcome.is_bad and not result.is_known)


@cached_per_run
def wrong_cells(run: Run) -> list[list[Result]]:
    """Return the findings that need action, grouped by cell; the finding that explains the others comes first."""
    return [in_reading_order(results) for results in by_cell(filter(is_wrong, run.results)).values()]


@cached_per_run
def failures(run: Run) -> list[FailureGroup]:
    """Return what went wrong in ``run``: one group per subject, cause and mechanism, the largest group first.

    The first finding of every wrong cell is in a group. Its further findings are too if they failed, name a cause, and
    are not consequences of another finding.
    """

    def mechanism(finding: Result) -> str:
        # If nothing was compared, the message without its numbers distinguishes failures with the same title.
        is_told = not is_unexplained(finding) or finding.outcome is Outcome.FAILED or finding.is_unexpectedly_good
        return "" if is_told else re.sub(r"\d+", "#", in_one_line(finding))

    groups: dict[tuple[str, str, str | None, str], dict[Coordinates, Result]] = {}
    for finding in (one for findings in wrong_cells(run) for one in by_themselves(findings)):
        key = finding.subject, _title(finding), finding.family, mechanism(finding)
        groups.setdefault(key, {}).setdefault(finding.coordinates, finding)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [FailureGroup(*key, tuple(found.values())) for key, found in ordered]


def mistakes(run: Run) -> dict[str, list[FailureGroup]]:
    """Return the mistakes of each subject that makes any, those in most cells first."""
    return grouped((group for group in failures(run) if group.is_mistake), lambda group: group.subject)


def known_failures(run: Run) -> dict[Expected, dict[str, list[str]]]:
    reasons: dict[Expected, dict[str, list[str]]] = {}
    for result in run.results:
        if result.expected is not None and result.is_known:
            reasons.setdefault(result.expected, {}).setdefault(result.cell, []).append(result.check)
    return reasons


def nothing_went_wrong(run: Run) -> str:
    expected = ", except where a failure was expected" if any(result.is_known for result in run.results) else ""
    return f"No recorded check failed, raised an error, crashed or timed out{expected}."


def message_of(result: Result) -> str:
    """Return a finding's message; for an unexpected pass, what was expected instead."""
    if result.expected is not None and result.is_unexpectedly_good:
        return f"{result.expected.entry} expects {result.expected.outcome.value}: {result.expected.reason}"
    return result.message


def in_one_line(result: Result, length: int = LONGEST_MESSAGE) -> str:
    return shortened(message_of(result).partition("\n")[0], length)


def as_sentence(result: Result) -> str:
    told = in_one_line(result, LONGEST_EXAMPLE)
    return told if told.endswith((".", "?", "!")) else f"{told}."


def as_consequence(result: Result) -> str:
    return f"consequence of {result.consequence_of}: {result.check}: {in_one_line(result, LONGEST_CONSEQUENCE)}"


def describe(result: Result) -> str:
    """Return a finding in words, for the test of its cell: what was found, the wrong parameters, what was expected."""
    if (entry := result.expected) is None:
        if result.consequence_of is not None:
            return as_consequence(result)
        table = parameter_table(tuple(result.parameters.items()), result.limit_x_noise)
        return "\n".join([f"{result.check}: {result.outcome.value}: {result.message}", *table])
    seen = f"The failure was seen with {entry.measured}. " if entry.measured else ""
    if result.is_known:
        known = f"known failure of {entry.library}" if entry.library else "known failure"
        place = f"{entry.entry}; {entry.link}" if entry.link else entry.entry
        return f"{result.check}: {result.outcome.value}, {known}: {entry.reason} ({place})"
    return (
        f"{result.check}: {result.outcome.value}, but {entry.outcome.value} was expected: {entry.reason}\n"
        f"  {seen}If it has been fixed, remove this cell, or the entry, from {entry.entry}"
    )


def outcome_in_words(result: Result) -> str:
    return UNEXPECTED_PASS if result.is_unexpectedly_good else result.outcome.value.replace("_", " ")


def expectation_details(expected: Expected) -> list[str]:
    """Return where an expected failure comes from: its library, what it was measured with, a program that shows it."""
    library = expected.library and f"known failure of {expected.library}"
    measured = expected.measured and f"measured with {expected.measured}"
    return [part for part in (library, measured, expected.reproduction) if part]


@dataclass(frozen=True)
class SubjectCauses:
    """The failing cells of one subject. ``cause`` is the cause that at least half of them name, None if there is none.

    ``example`` is the finding of the first cell that names it. ``explained`` are the cells that name it, ``others`` the
    remaining cells, and ``other_causes`` the causes of these. ``contradicting`` are cells of ``others``, each with its
    cause, in which the same mistake should show but the same check names another cause: they have the workload, backend
    and precision of an explained cell, on another number of devices.
    """

    subject: str
    wrong: int
    cause: Cause | None
    example: Result | None
    explained: tuple[str, ...]
    others: tuple[str, ...]
    other_causes: tuple[str, ...]
    contradicting: tuple[tuple[str, str], ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        if self.cause is None or self.example is None:
            return (f"{self.subject}: no single cause explains most of its {self.wrong} failing cells.",)
        name, family = self.cause
        named = f"{name} ({family})" if family else name
        whole = "both failing cells" if self.wrong == 2 else f"all {self.wrong} failing cells"
        which = f"{len(self.explained)} of {self.wrong} failing cells" if self.others else whole
        sentences = [f"{self.subject}: {which} have the same cause, {named}: {as_sentence(self.example)}"]
        if self.others:
            have = "has" if len(self.others) == 1 else "have"
            cause = f", {self.other_causes[0]}" if len(self.other_causes) == 1 else ""
            cells = listed(self.others, MOST_CELLS)
            sentences.append(f"{counted(len(self.others), 'cell')} {have} another cause{cause}: {cells}.")
        return (*sentences, *([self.doubt] if self.doubt else []))

    @property
    def doubt(self) -> str:
        """A sentence on the evidence against the commonest cause; "" if there is none."""
        if self.cause is None or not self.contradicting:
            return ""
        cells = listed([f"{cell} ({cause})" for cell, cause in self.contradicting], MOST_CELLS)
        return (
            f"{self.subject}: {self.cause[0]} would also show in {cells}, but another cause was found there: "
            "one of the two may be wrong, or the trainer makes several mistakes."
        )


def subject_causes(run: Run) -> list[SubjectCauses]:
    subjects: dict[str, dict[str, list[Result]]] = {}
    for findings in wrong_cells(run):
        subjects.setdefault(findings[0].subject, {})[findings[0].cell] = findings
    return [_summary(subject, cells) for subject, cells in subjects.items() if len(cells) > 1]


def _summary(subject: str, cells: Mapping[str, Sequence[Result]]) -> SubjectCauses:
    first = {cell: findings[0] for cell, findings in cells.items()}
    counts = Counter(_cause(result) for result in first.values() if not is_unexplained(result))
    cause, count = counts.most_common(1)[0] if counts else (None, 0)
    if cause is None or count < 2 or 2 * count < len(cells):
        return SubjectCauses(subject, len(cells), None, None, (), tuple(cells), (), ())

    roots = {
        cell: {_cause(one) for one in findings if one.consequence_of is None and not is_unexplained(one)}
        for cell, findings in cells.items()
    }
    explained = tuple(cell for cell in cells if cause in roots[cell])
    others = tuple(cell for cell in cells if cause not in roots[cell])
    examples = [first[cell] for cell in cells if _cause(first[cell]) == cause]
    shows = {_problem(first[cell]) for cell in explained if _cause(first[cell]) == cause}
    contradicting = tuple(
        (cell, str(first[cell].cause))
        for cell in others
        if _problem(first[cell]) in shows and not is_unexplained(first[cell])
    )
    other_causes = tuple(dict.fromkeys(_title(first[cell]) for cell in others))
    return SubjectCauses(subject, len(cells), cause, examples[0], explained, others, other_causes, contradicting)


def _extent(found: Sequence[Result]) -> str:
    """Return which cells these are: the values of each dimension if they are all combinations, else each cell."""
    cells = list(
        dict.fromkeys((one.workload, one.backend, f"{one.num_nodes}×{one.gpus}", one.precision) for one in found)
    )
    kinds = [list(dict.fromkeys(kind)) for kind in zip(*cells, strict=True)]
    if len(cells) == math.prod(map(len, kinds)):
        return " · ".join(listed(kind, MOST_NAMES) for kind in kinds)
    return listed(map(" ".join, cells), MOST_NAMES)


def parameter_table(parameters: Sequence[tuple[str, float]], limit: float | None) -> list[str]:
    rows = parameter_rows(parameters, limit)
    if not rows:
        return []
    width = max(len(name) for name, _, _ in rows)
    allowed = "" if limit is None else f" (at most {compact(limit)} allowed)"
    lines = [f"  {'parameter':{width}}  × noise{allowed}"]
    lines += [f"  {name:{width}}  {compact(error):>7}{'  wrong' if wrong else ''}" for name, error, wrong in rows]
    return lines


def parameter_rows(parameters: Sequence[tuple[str, float]], limit: float | None) -> list[tuple[str, float, bool]]:
    """Return a row per parameter, or per module if there are many: name, error × noise, is it above ``limit``."""
    rows: dict[str, float] = {}
    modules = as_rows((name for name, _ in parameters), MOST_ROWS)
    for name, error in parameters:
        rows[modules[name]] = max(rows.get(modules[name], 0.0), math.inf if math.isnan(error) else error)
    worst = sorted(rows, key=lambda module: -rows[module])[:MOST_ROWS]
    return [
        (shortened(printable(name), LONGEST_PARAMETER), error, limit is not None and not error <= limit)
        for name, error in rows.items()
        if name in worst
    ]


def _title(finding: Result) -> str:
    if finding.cause not in (None, UNEXPLAINED):
        return str(finding.cause)
    return f"{outcome_in_words(finding)}: {finding.check}"


def _cause(result: Result) -> Cause:
    return str(result.cause), result.family


def _problem(result: Result) -> tuple[str, ...]:
    return result.check, result.workload, result.backend, result.precision, result.accelerator


MOST_NAMES: Final = 4

_ADVICE: Final = {
    Outcome.FAILED: "No known mistake explains this. Look at the errors by parameter and step to find where it begins.",
    Outcome.ERRORED: "Read the message, then the rank's log.",
    Outcome.CRASHED: "Read the last lines of the ranks' logs, beginning with the first rank that ended.",
    Outcome.TIMED_OUT: "Look for a collective that not all ranks call: the ranks' logs show where each one waits.",
}


@dataclass(frozen=True)
class Diagnosis:
    """A group of failures as a page shows it; ``right`` is the same check and workload in a right cell, if any."""

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
    right = grouped((one for one in drawn if one.outcome in (Outcome.PASSED, Outcome.DEVIATES)), _check_of_problem)
    return [_diagnosis(group, right.get(_check_of_problem(group.findings[0]), ())) for group in failures(run)]


def _diagnosis(group: FailureGroup, right: Iterable[Result]) -> Diagnosis:
    finding, found = group.findings[0], group.findings
    layer = (finding.parameter or "").rpartition(".")[0]
    is_named = finding.cause not in (None, UNEXPLAINED) and finding.outcome is Outcome.FAILED
    advice = "" if is_named else _ADVICE.get(finding.outcome, "")
    if finding.hint or finding.is_unexpectedly_good:
        advice = finding.hint or "Remove the expectation."

    def likeness(one: Result) -> tuple[bool, ...]:
        place, own = one.coordinates, finding.coordinates
        same = ("precision", "topology", "backend", "subject")
        return tuple(getattr(place, name) == getattr(own, name) for name in same)

    return Diagnosis(
        group,
        heading(group.in_words),
        without_hint(message_of(finding), finding.hint),
        (*location(finding), *([f"layer {layer}"] if layer else [])),
        size(finding),
        certainty(finding),
        advice,
        f"{counted(len(found), 'cell')}: {_extent(found)}",
        max(right, key=likeness, default=None) if finding.error_grid is not None else None,
    )


def size(finding: Result) -> str:
    if finding.error_x_noise is None:
        return ""
    limit = finding.limit_x_noise
    allowed = (
        "" if limit is None else f"; a correct trainer stays below {compact(limit)}" if limit else "; it must be 0"
    )
    largest = x_noise(finding.error_x_noise)
    if finding.parameters:
        # An error that is small in each parameter can be large for all of them together.
        largest = f"up to {largest} over all steps, in one parameter or in all of them together"
    return f"{largest}{allowed}"


def certainty(finding: Result) -> str:
    if finding.is_unexpectedly_good:
        return "Certain: this check was expected to fail, and passed."
    sentences = []
    error, limit = finding.error_x_noise, finding.limit_x_noise
    if error is not None and limit:
        sentences.append(f"The error is {compact(error / limit)} × the limit.")
    elif error is not None and limit == 0:
        sentences.append("The numbers are exact, so any difference is an error.")
    elif finding.outcome is Outcome.FAILED and error is None:
        sentences.append("Counted or compared bit for bit: rounding plays no role.")
    elif finding.check == "launch":
        sentences.append("The training did not end normally, so its numbers were not checked.")
    elif finding.outcome is not Outcome.FAILED:
        sentences.append(
            "It has no verdict: the training or the check ended early, or the check could not have failed."
        )
    if finding.cause_x_noise is not None:
        sentences.append(f"The cause predicts the recorded numbers within {x_noise(finding.cause_x_noise)}.")
    elif finding.outcome is Outcome.FAILED and finding.cause not in (None, UNEXPLAINED):
        sentences.append("The cause explains what this check recorded.")
    elif finding.outcome is Outcome.FAILED:
        sentences.append("It is certainly wrong, but the cause is unknown.")
    return " ".join(sentences)


def _check_of_problem(finding: Result) -> tuple[str, str]:
    return finding.check, finding.workload
