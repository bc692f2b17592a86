"""Are the figures that the trainer reports true?"""

from __future__ import annotations

import math

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes import explain_metrics
from harness.judge.error_outcome import Deviation, Vacuous, found, larger, times
from harness.judge.oracle.expected_metrics import LossTable, Report
from harness.judge.trace_analysis import TraceAnalysis


def metrics(analysis: TraceAnalysis) -> Finding | None:
    """Each ``loss`` and ``val_loss``, on each rank that reports it, against the mean that it stands for.

    Noise is what the same mean in the cell's own precision, on one device, differs by; at least one rounding. Where
    nobody asked for metrics and none was reported there is no question, nor where a loss is no mean over samples.
    """
    asked = "metrics" in analysis.workload.needs
    if not asked and not any(trace.logged for trace in analysis.trace.ranks):
        return None
    books = LossTable(analysis)
    if not books.reports:
        if asked:
            raise Vacuous("no 'loss' and no 'val_loss' was logged after training had begun")
        return None
    worst: Deviation | None = None
    wrong: list[Report] = []
    for report in books.reports:
        error = min((books.error(report, truth) for truth in books.expected_values(report)), default=math.inf)
        worst = larger(worst, Deviation(error, report.step, None, report.rank))
        if not error <= books.limit:
            wrong.append(report)
    assert worst is not None
    if wrong:
        return explain_metrics(_accusation(wrong[0], len(wrong), books, worst), wrong, books)
    names = " and ".join(sorted({report.name for report in books.reports}))
    message = f"each of {len(books.reports)} values of {names} is true: {times(worst.x_noise)} at {worst.where}"
    return found("metrics", Outcome.PASSED, message, worst, books.limit)


def _accusation(report: Report, count: int, books: LossTable, worst: Deviation) -> Finding:
    """Return the finding for the first report that is wrong, of so many."""
    truths = books.expected_values(report)
    nearest = min(truths, key=lambda truth: abs(truth - report.value), default=math.nan)
    error = times(books.error(report, nearest))
    message = (
        f"{report.name} was reported as {report.value:.6g} at step {report.step} on rank {report.rank}, "
        f"and is {nearest:.6g} ({error}; {count} of {len(books.reports)} values are wrong)"
    )
    place = Deviation(worst.x_noise, report.step, None, report.rank)
    return found("metrics", Outcome.FAILED, message, place, books.limit)
