"""Is the gradient that the optimizer got the right one?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.causes.registry import explain
from plumbline.judge.oracle_truth import OracleTruth
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.truth import Truth


def gradients(analysis: TraceAnalysis) -> Finding:
    """Judge the gradients of a subject, whose workload is known."""
    return judge_by(OracleTruth(analysis))


def judge_by(truth: Truth[Any]) -> Finding:
    """Compare all gradients with what a truth knows to be right, and explain the wrong ones by the known mistakes."""
    finding = truth.compare()
    if finding.outcome is not Outcome.FAILED or finding.cause is not None:
        return finding
    wrong = [case for case in truth.cases if not case.is_right]
    finding = truth.place(finding, wrong)
    if finding.outcome is not Outcome.FAILED or finding.cause is not None:
        return finding
    evidence = truth.evidence(wrong)
    finding = replace(finding, cause=UNEXPLAINED) if evidence is None else explain(finding, evidence)
    return truth.conclude(finding, wrong)
