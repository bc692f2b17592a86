"""A run's report for programs: JSON (``report.schema.json``), CSV, and annotations for CI systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd
from pydantic import BaseModel

from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.report.annotations import Annotation, annotate, code_quality, github_commands, sarif
from plumbline.report.formats import ReportFormat
from plumbline.report.tables.cells import cell_table, outcome_counts
from plumbline.report.tables.claims import Claim, claims
from plumbline.report.tables.failures import FailureGroup, SubjectCauses, failures, message_of, subject_causes
from plumbline.report.tables.measured import metrics_table
from plumbline.report.tables.run_summary import RunVerdict, comparability, facts, verdict_of
from plumbline.report.tables.support import support_table
from plumbline.report.text import listed, printable
from plumbline.results.fields import Count, Text, XNoise, document_schema
from plumbline.results.records import CellRecord
from plumbline.results.run import Run

VERSION: Final = 1  # of the schema; adding a field does not change it
FILE: Final = Path(__file__).with_name("report.schema.json")
Number = XNoise  # a number; infinity is the string ``inf``


class ReportedCell(CellRecord):
    """A cell and its worst finding. ``known``, ``unexpected pass`` and ``missing`` are outcomes of cells only."""

    outcome: Outcome | Literal["known", "unexpected pass", "missing"]
    has_failed: bool
    error_x_noise: Number | None
    seconds: float | None


class ReportedFigure(CellRecord):
    """A measured figure of a cell, or the error of a check. ``low`` and ``high`` bound it with 95 % confidence."""

    run: Text
    check: Text | None
    metric: Text
    value: Number | None
    unit: Text
    rank: Count | None
    low: Number | None
    high: Number | None
    better: Literal["higher", "lower"] | None
    refusal: Text | None
    conformance: Text | None


class ReportedFailure(BaseModel):
    """Cells of one subject that are wrong for the same reason. The message and the command are of the first cell."""

    subject: Text
    cause: Text
    family: Text | None
    cells: tuple[Text, ...]
    message: Text
    reproduce: Text

    @classmethod
    def of(cls, group: FailureGroup) -> ReportedFailure:
        first = group.findings[0]
        return cls(
            subject=group.subject,
            cause=group.title,
            family=group.family,
            cells=tuple(finding.cell for finding in group.findings),
            message=message_of(first),
            reproduce=first.reproduce,
        )


class ReportedSubject(BaseModel):
    """The common cause of a subject's wrong cells. ``contradicting`` has the cells that name another, with its name."""

    subject: Text
    wrong: Count
    cause: Text | None
    family: Text | None
    explained: tuple[Text, ...]
    not_explained: tuple[Text, ...]
    contradicting: dict[Text, Text]
    summary: Text

    @classmethod
    def of(cls, one: SubjectCauses) -> ReportedSubject:
        cause, family = one.cause or (None, None)
        return cls(
            subject=one.subject,
            wrong=one.wrong,
            cause=cause,
            family=family,
            explained=one.explained,
            not_explained=one.others,
            contradicting=dict(one.contradicting),
            summary=" ".join(one.sentences),
        )


class ReportDocument(BaseModel):
    """The document that ``plumbline report --format json`` writes. ``support`` has the support table, by column."""

    version: Literal[1] = VERSION
    run: dict[Text, Text]
    simulated: bool
    incomplete: bool
    verdict: RunVerdict
    outcomes: dict[Text, Count]
    cells: tuple[ReportedCell, ...]
    support: tuple[dict[Text, int | Number | Text | None], ...]
    subjects: tuple[ReportedSubject, ...]
    failures: tuple[ReportedFailure, ...]
    metrics: tuple[ReportedFigure, ...]
    claims: tuple[Claim, ...]
    comparability: dict[Text, Text]


def as_json(run: Run) -> str:
    """Return the document as ASCII with a final line break. NaN becomes null, infinity the string ``inf``."""
    cells = cell_table(run)
    document = ReportDocument(
        run=facts(run),
        simulated=run.header.simulated,
        incomplete=run.incomplete,
        verdict=verdict_of(run, cells),
        outcomes=outcome_counts(cells["outcome"]),
        cells=_rows(cells),
        support=_rows(support_table(run)),
        subjects=tuple(map(ReportedSubject.of, subject_causes(run))),
        failures=tuple(map(ReportedFailure.of, failures(run))),
        metrics=_rows(metrics_table(run)),
        claims=tuple(claims(run)),
        comparability=comparability(run.header.fingerprint),
    )
    return f"{json.dumps(document.model_dump(mode='json'), allow_nan=False)}\n"


def report_schema() -> dict[str, Any]:
    return document_schema(ReportDocument, "report", VERSION)


def _rows(table: pd.DataFrame) -> Any:
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]


FORMAT = ReportFormat("for programs, everything that the pages show", as_json)


def metrics_csv(run: Run) -> str:
    """Return one row per metric. An infinite number is ``inf``, a missing one is empty."""
    return _as_csv(metrics_table(run))


def support_csv(run: Run) -> str:
    return _as_csv(support_table(run))


def _as_csv(table: pd.DataFrame) -> str:
    return str(table.map(lambda value: printable(value) if isinstance(value, str) else value).to_csv(index=False))


CSV = ReportFormat("every metric in long form", metrics_csv, {"metrics.csv": metrics_csv, "support.csv": support_csv})


MOST_CELLS = 5


def annotations_of(run: Run) -> list[Annotation]:
    return [_annotation(run, group) for group in failures(run)]


def run_commands(run: Run) -> str:
    return github_commands(annotations_of(run))


def run_sarif(run: Run) -> str:
    about = {"run": run.header.run_id, "command": list(run.header.command)}
    return sarif(annotations_of(run), succeeded=not run.incomplete, properties=about)


def _annotation(run: Run, group: FailureGroup) -> Annotation:
    first = group.findings[0]
    cells = [finding.cell for finding in group.findings]
    family = f" ({group.family})" if group.family else ""
    source = run.header.sources.get(first.subject)  # where the subject's function begins
    if first.expected is not None and first.is_unexpectedly_good:
        source = first.expected.source  # the entry of an expectation that is no longer met
    return annotate(
        first,
        message_of(first),
        rule=group.title,
        title=f"{group.subject}: {group.title}{family} in {counted(len(cells), 'cell')}",
        key="/".join(filter(None, (group.subject, group.title, group.mechanism))),
        source=None if source is None else (source.file, source.line),
        lines=[f"cells: {listed(cells, MOST_CELLS)}", first.reproduce and f"reproduce: {first.reproduce}"],
        subject=group.subject,
        cells=cells,
        reproduce=first.reproduce,
    )


GITHUB = ReportFormat("annotations of GitHub Actions, for a step to print", run_commands)
SARIF = ReportFormat("SARIF 2.1.0, for code scanning and editors", run_sarif)
CODE_QUALITY = ReportFormat("GitLab's report on code quality", lambda run: code_quality(annotations_of(run)))
