"""A run's report for programs: one JSON object with what the pages show, without markup."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from harness.report.formats import ReportFormat
from harness.report.tables.cells import cell_table, outcome_counts
from harness.report.tables.claims import claims
from harness.report.tables.failures import failures, message_of, subject_causes
from harness.report.tables.measured import metrics_table
from harness.report.tables.run_summary import comparability, facts, verdict_of
from harness.report.tables.support import support_table
from harness.results.run import Run


def as_json(run: Run) -> str:
    """Return the object in ASCII, with a final line break; NaN is null, an infinite number the string ``inf``."""
    cells = cell_table(run)
    content = {
        "run": facts(run),
        "simulated": run.header.simulated,
        "incomplete": run.incomplete,
        "verdict": asdict(verdict_of(run, cells)),
        "outcomes": outcome_counts(cells["outcome"]),
        "cells": cells.to_dict("records"),
        "support": support_table(run).to_dict("records"),
        "subjects": [
            {
                "subject": one.subject,
                "wrong": one.wrong,
                "cause": one.cause and one.cause[0],
                "family": one.cause and one.cause[1],
                "explained": one.explained,
                "not_explained": one.others,
                "contradicting": dict(one.contradicting),
                "summary": " ".join(one.sentences),
            }
            for one in subject_causes(run)
        ],
        "failures": [
            {
                "cause": group.title,
                "family": group.family,
                "cells": [finding.cell for finding in group.findings],
                "message": message_of(group.findings[0]),
                "reproduce": group.findings[0].reproduce,
            }
            for group in failures(run)
        ],
        "metrics": metrics_table(run).astype(object).to_dict("records"),
        "claims": [asdict(claim) for claim in claims(run)],
        "comparability": comparability(run.header.fingerprint),
    }
    return f"{json.dumps(_plain(content), allow_nan=False)}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, str | int | float | bool | None) else None


FORMAT = ReportFormat("for programs, everything that the pages show", as_json)
