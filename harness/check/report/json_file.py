"""The verdict as JSON: all of it, in full precision, for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from harness.check.command.command import CheckedCommand
from harness.check.judge.coverage import Coverage
from harness.check.judge.judging import CheckedTraining
from harness.check.judge.noted import Information
from harness.check.verdict.description import describe
from harness.check.verdict.verdict import Verdict, answer_of, sentence_on
from harness.core.finding import Finding

VERSION = 1
"""Of the schema; a field may be added without a new one."""


def as_json(checked: CheckedCommand, verdict: Verdict) -> str:
    """Return the document; what does not apply is null."""
    end = checked.end
    document = {
        "version": VERSION,
        "command": list(checked.command),
        "exit_code": verdict.exit_code,
        "verdict": verdict.answer.value,
        "sentence": verdict.sentence,
        "incidents": list(verdict.incidents),
        "script": {"exit_code": end.exit_code, "ended_by": end.by.value, "seconds": end.seconds},
        "judging_seconds": checked.judging_s,
        "trainings": [_training(one) for one in checked.trainings],
    }
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _training(one: CheckedTraining) -> dict[str, Any]:
    what = describe(one.training)
    return {
        "verdict": answer_of(one).value,
        "sentence": sentence_on(one),
        "ranks": what.ranks,
        "steps": what.steps,
        "backward_passes": list(what.passes),
        "optimizers": list(what.optimizers),
        "precision": list(what.precision),
        "wrappers": list(what.wrappers),
        "coverage": _coverage(one.coverage),
        "findings": [_finding(finding) for finding in one.findings],
    }


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "parameters": coverage.entries,
        "compared": coverage.compared_share,
        "replayed": coverage.share,
        "uncovered": [asdict(one) for one in coverage.uncovered],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        **asdict(finding),
        "outcome": finding.outcome.value,
        "parameters": dict(finding.parameters),
        "information": isinstance(finding, Information),
    }


def _finite(value: Any) -> Any:
    """Return the value with infinities as words, which JSON has no numbers for, and NaN as null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
