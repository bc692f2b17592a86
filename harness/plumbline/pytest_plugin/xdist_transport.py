"""A cell's records and outcome, attached to its test report, which xdist sends to the controller."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from plumbline.report.text import printable
from plumbline.results.records import Measurement, Result
from plumbline.results.run import record_of

_RECORDS = "plumbline"
_OUTCOME = "plumbline-outcome"


@dataclass(frozen=True)
class ReportPayload:
    """The records of a cell, and the folders of its trace and profile."""

    results: tuple[Result, ...]
    measurements: tuple[Measurement, ...]
    evidence: Path | None
    profile: Path | None = None


def attach_outcome(item: pytest.Item, outcome: str) -> None:
    item.user_properties.append((_OUTCOME, outcome))


def attach_properties(item: pytest.Item, results: Sequence[Result]) -> None:
    """Attach the properties of a test in JUnit's XML: the cell and its first finding."""
    first = results[0]
    place = {"step": first.step, "rank": first.rank, "parameter": first.parameter}
    told = {"cell": first.cell, "check": first.check, "cause": first.cause, "family": first.family, **place}
    item.user_properties += [
        (name, printable(str(value)))
        for name, value in (*told.items(), ("command", first.reproduce))
        if value not in (None, "")
    ]


def outcome_of(report: pytest.TestReport) -> str | None:
    """Return the outcome in the report of a test's call, None for setup and teardown."""
    return str(dict(report.user_properties).get(_OUTCOME)) if report.when == "call" else None


def attach_payload(
    item: pytest.Item, records: Iterable[Result | Measurement], evidence: str | None, profile: str | None
) -> None:
    lines = [record.model_dump_json() for record in records]
    payload = {"records": lines, "evidence": evidence, "profile": profile}
    item.user_properties.append((_RECORDS, json.dumps(payload)))


def payload_of(report: pytest.TestReport) -> ReportPayload | None:
    found = dict(report.user_properties).get(_RECORDS)
    if report.when != "call" or found is None:
        return None
    values = json.loads(str(found))
    records = [record_of(line.encode()) for line in values["records"]]
    return ReportPayload(
        tuple(record for record in records if isinstance(record, Result)),
        tuple(record for record in records if isinstance(record, Measurement)),
        *(None if values[name] is None else Path(values[name]) for name in ("evidence", "profile")),
    )
