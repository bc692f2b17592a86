"""A finding at a line: one for each cause of each subject in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness.report.tables.failures import failures, location, message_of
from harness.report.text import compact, counted
from harness.results.records import Result, SourceLine
from harness.results.run import Run

MOST_CELLS = 5


@dataclass(frozen=True)
class Annotation:
    """What is wrong, and where it is to be looked for; ``source`` is None where no line is known.

    ``rule`` is the cause's name. ``key`` is the same in every run that has the same problem. ``details`` are further
    facts for programs, as JSON values.
    """

    rule: str
    title: str
    message: str
    key: str
    source: SourceLine | None = None
    details: dict[str, Any] = field(default_factory=dict)


def annotations_of(run: Run) -> list[Annotation]:
    """Return what went wrong in a run and is not known, the most frequent cause first."""
    return [
        _annotation(run, group.title, group.family, subject, found)
        for group in failures(run)
        for subject, found in _by_subject(group.findings).items()
    ]


def _by_subject(findings: tuple[Result, ...]) -> dict[str, list[Result]]:
    subjects: dict[str, list[Result]] = {}
    for finding in findings:
        subjects.setdefault(finding.subject, []).append(finding)
    return subjects


def _annotation(run: Run, title: str, family: str | None, subject: str, findings: list[Result]) -> Annotation:
    first = findings[0]
    return Annotation(
        rule=title,
        title=f"{subject}: {title}{f' ({family})' if family else ''} in {counted(len(findings), 'cell')}",
        message="\n".join(_lines(findings)),
        key=f"{subject}/{title}",
        source=_source(run, first),
        details={
            "subject": subject,
            "family": family,
            "check": first.check,
            "step": first.step,
            "rank": first.rank,
            "parameter": first.parameter,
            "cells": [finding.cell for finding in findings],
            "reproduce": first.reproduce,
        },
    )


def _source(run: Run, finding: Result) -> SourceLine | None:
    """Return the entry of an expectation that is not met any more, otherwise where the subject's function begins."""
    if finding.expected is not None and finding.is_unexpectedly_good:
        return finding.expected.source
    return run.header.sources.get(finding.subject)


def _lines(findings: list[Result]) -> Iterator[str]:
    first = findings[0]
    yield message_of(first)
    where = ", ".join(location(first))
    if first.error_x_noise is not None:
        yield f"{compact(first.error_x_noise)} × rounding noise{f' at {where}' if where else ''}"
    cells = [finding.cell for finding in findings]
    more = f" and {len(cells) - MOST_CELLS} more" if len(cells) > MOST_CELLS else ""
    yield f"cells: {', '.join(cells[:MOST_CELLS])}{more}"
    if first.reproduce:
        yield f"reproduce: {first.reproduce}"
