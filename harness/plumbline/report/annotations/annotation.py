"""A finding at a line: one for each cause of each subject in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbline.report.tables.failures import FailureGroup, failures, location, message_of
from plumbline.report.text import counted, listed, x_noise
from plumbline.results.records import Result, SourceLine
from plumbline.results.run import Run

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
    return [_annotation(run, group) for group in failures(run)]


def _annotation(run: Run, group: FailureGroup) -> Annotation:
    findings = group.findings
    first = findings[0]
    family = f" ({group.family})" if group.family else ""
    return Annotation(
        rule=group.title,
        title=f"{group.subject}: {group.title}{family} in {counted(len(findings), 'cell')}",
        message="\n".join(_lines(findings)),
        key="/".join(filter(None, (group.subject, group.title, group.mechanism))),
        source=_source(run, first),
        details={
            "subject": group.subject,
            "family": group.family,
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


def _lines(findings: Sequence[Result]) -> Iterator[str]:
    first = findings[0]
    yield message_of(first)
    where = ", ".join(location(first))
    if first.error_x_noise is not None:
        yield f"{x_noise(first.error_x_noise)}{f' at {where}' if where else ''}"
    yield f"cells: {listed([finding.cell for finding in findings], MOST_CELLS)}"
    if first.reproduce:
        yield f"reproduce: {first.reproduce}"
