"""What went wrong in a run, by cause: one group for each, the largest first."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.finding import UNEXPLAINED, in_reading_order
from harness.report.text import shortened
from harness.results.records import UNEXPECTED_PASS, Coordinates, Expected, Result
from harness.results.run import Run

LONGEST_CONSEQUENCE = 160


@dataclass(frozen=True)
class Group:
    """Cells that went wrong for the same reason, and of each the finding that explains it best.

    ``title`` names the reason, ``family`` is the cause's, None without one.
    """

    title: str
    family: str | None
    findings: tuple[Result, ...]


def is_wrong(result: Result) -> bool:
    """Say whether a finding is one to act upon: bad and not known to be, or unexpectedly good."""
    return result.is_unexpectedly_good or (result.outcome.is_bad and not result.is_known)


def failures(run: Run) -> list[Group]:
    """Return what went wrong in ``run``, by cause."""
    wrong: dict[Coordinates, list[Result]] = {}
    for result in run.results:
        if is_wrong(result):
            wrong.setdefault(result.coordinates, []).append(result)
    groups: dict[tuple[str, str | None], list[Result]] = {}
    for results in wrong.values():
        best = in_reading_order(results)[0]
        groups.setdefault((_title(best), best.family), []).append(best)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [Group(title, family, tuple(found)) for (title, family), found in ordered]


def known_failures(run: Run) -> dict[Expected, dict[str, list[str]]]:
    """Return what went wrong as expected: for each reason its cells, and of each the checks."""
    reasons: dict[Expected, dict[str, list[str]]] = {}
    for result in run.results:
        if result.expected is not None and result.is_known:
            reasons.setdefault(result.expected, {}).setdefault(result.cell, []).append(result.check)
    return reasons


def what_it_says(result: Result) -> str:
    """Return a finding's message; of an unexpected pass, what was expected instead."""
    if result.expected is not None and result.is_unexpectedly_good:
        return f"{result.expected.entry} expects {result.expected.outcome.value}: {result.expected.reason}"
    return result.message


def as_consequence(result: Result) -> str:
    """Return in one line a finding that another one explains: which, and what it saw."""
    first = what_it_says(result).partition("\n")[0]
    return f"consequence of {result.consequence_of}: {result.check}: {shortened(first, LONGEST_CONSEQUENCE)}"


def outcome_in_words(result: Result) -> str:
    """Return how a finding ended, for reading."""
    return UNEXPECTED_PASS if result.is_unexpectedly_good else result.outcome.value.replace("_", " ")


def _title(finding: Result) -> str:
    if finding.cause not in (None, UNEXPLAINED):
        return str(finding.cause)
    return f"{outcome_in_words(finding)}: {finding.check}"
