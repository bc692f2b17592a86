"""What the test of a cell hands over with its report, from one process to another under xdist."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.results.json_lines import record_of
from harness.results.records import Measurement, Result

_RECORDS = "plumbline"
_OUTCOME = "plumbline-outcome"


@dataclass(frozen=True)
class ReportPayload:
    """The records of a cell, and the folder of its evidence, None where it left none."""

    results: tuple[Result, ...]
    measurements: tuple[Measurement, ...]
    evidence: Path | None


def attach_outcome(item: pytest.Item, word: str) -> None:
    """Let the report say how the cell ended."""
    item.user_properties.append((_OUTCOME, word))


def outcome_of(report: pytest.TestReport) -> str | None:
    """Return the word for how a cell ended; None if this is no report of that."""
    return str(dict(report.user_properties).get(_OUTCOME)) if report.when == "call" else None


def attach_payload(item: pytest.Item, records: Iterable[Result | Measurement], evidence: str | None) -> None:
    """Let the report bring a cell's records along, and say where its evidence lies."""
    lines = [record.model_dump_json() for record in records]
    item.user_properties.append((_RECORDS, json.dumps({"records": lines, "evidence": evidence})))


def payload_of(report: pytest.TestReport) -> ReportPayload | None:
    """Return what came along with a report; None if it brought nothing."""
    found = dict(report.user_properties).get(_RECORDS)
    if report.when != "call" or found is None:
        return None
    values = json.loads(str(found))
    records = [record_of(line.encode()) for line in values["records"]]
    return ReportPayload(
        tuple(record for record in records if isinstance(record, Result)),
        tuple(record for record in records if isinstance(record, Measurement)),
        None if values["evidence"] is None else Path(values["evidence"]),
    )
