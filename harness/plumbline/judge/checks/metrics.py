"""Are the metrics that the trainer reports correct?"""

from __future__ import annotations

import math

from plumbline.core.finding import Finding
from plumbline.core.numbers import x_noise
from plumbline.core.outcome import Outcome
from plumbline.judge.causes.metric_hypotheses import explain_metrics
from plumbline.judge.expected_metrics import LossTable, ReportedValue
from plumbline.judge.findings import Vacuous, error_at, from_deviation
from plumbline.judge.oracle.noise import Deviation, larger
from plumbline.judge.trace_analysis import TraceAnalysis


def metrics(analysis: TraceAnalysis) -> Finding | None:
    """Compare each ``loss`` and ``val_loss``, on each rank that reports it, with the mean that it should be.

    Noise is the error of the same mean in the cell's precision on one device, and at least one rounding. None if the
    workload needs no metrics and none that can be judged was reported: a loss that is not a mean over samples cannot.
    """
    needed = "metrics" in analysis.workload.needs
    if not needed and not any(trace.logged for trace in analysis.trace.ranks):
        return None
    table = LossTable(analysis)
    if not table.reports:
        if needed:
            raise Vacuous("no 'loss' and no 'val_loss' was logged after training had begun")
        return None
    worst: Deviation | None = None
    wrong: list[ReportedValue] = []
    for report in table.reports:
        error = min((table.error(report, value) for value in table.expected_values(report)), default=math.inf)
        worst = larger(worst, Deviation(error, report.step, None, report.rank))
        if not error <= table.limit:
            wrong.append(report)
    assert worst is not None
    if wrong:
        return explain_metrics(_failed(wrong[0], len(wrong), table, worst.x_noise), wrong, table)
    names = " and ".join(sorted({report.name for report in table.reports}))
    message = f"all {len(table.reports)} reported values of {names} are correct: {error_at(worst, table.limit)}"
    return from_deviation("metrics", Outcome.PASSED, message, worst, table.limit)


def _failed(report: ReportedValue, count: int, table: LossTable, worst: float) -> Finding:
    values = table.expected_values(report)
    nearest = min(values, key=lambda value: abs(value - report.value), default=math.nan)
    message = (
        f"{report.name} was reported as {report.value:.6g} where {nearest:.6g} is correct, an error of "
        f"{x_noise(table.error(report, nearest))} at step {report.step} on rank {report.rank}; "
        f"{count} of {len(table.reports)} reported values are wrong"
    )
    place = Deviation(worst, report.step, None, report.rank)
    return from_deviation("metrics", Outcome.FAILED, message, place, table.limit)
