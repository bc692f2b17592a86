"""The smallest error that a check notices in one training, and in 99 % of many."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Trace
from plumbline.judge.checks.gradients import compare_gradients
from plumbline.judge.checks.update import compare_updates
from plumbline.judge.expected_metrics import LossTable, ReportedValue
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.power.injection import Place, gradient_off, places, update_off

SMALLEST, LARGEST = 1e-18, 1.0
"""Errors between which the limit is searched: below any rounding, and as large as the tensor."""

PRECISION = 1.1
"""The factor to which a limit is known. Limits of different steps and tensors differ far more."""

CAUGHT = 0.99

Limits = Callable[[TraceAnalysis, Trace, int, int], Iterator[float]]
"""Yields the smallest error that is caught, in each of ``count`` places of a right training that a seed draws."""


def _of_steps(
    inject: Callable[[Trace, Place, float], Trace], compare: Callable[[TraceAnalysis], Finding], *, whole: bool
) -> Limits:
    def limits(analysis: TraceAnalysis, trace: Trace, count: int, seed: int) -> Iterator[float]:
        for place in places(trace, count, seed, whole=whole):

            def is_caught(size: float, place: Place = place) -> bool:
                return compare(_with(analysis, inject(trace, place, size))).outcome is Outcome.FAILED

            yield smallest(is_caught)

    return limits


def _of_metrics(analysis: TraceAnalysis, trace: Trace, count: int, seed: int) -> Iterator[float]:
    table, draw = LossTable(analysis), random.Random(seed)
    for _ in range(count if table.reports else 0):
        report = draw.choice(table.reports)
        expected = list(table.expected_values(report))

        def is_caught(size: float, report: ReportedValue = report, expected: Sequence[float] = expected) -> bool:
            off = replace(report, value=report.value * (1 + size))
            return not min((table.error(off, value) for value in expected), default=math.inf) <= table.limit

        yield smallest(is_caught)


KINDS: Mapping[str, Limits] = {
    "gradient, times a number": _of_steps(gradient_off, compare_gradients, whole=True),
    "gradient, one tensor": _of_steps(gradient_off, compare_gradients, whole=False),
    "update, times a number": _of_steps(update_off, compare_updates, whole=True),
    "update, one tensor": _of_steps(update_off, compare_updates, whole=False),
    "metric, times a number": _of_metrics,
}
"""Kinds of errors, with the limits of the check that has to notice them."""


def smallest(caught: Callable[[float], bool]) -> float:
    """Return the smallest relative error that is caught, by bisection; infinity if none is."""
    if not caught(LARGEST):
        return math.inf
    low, high = SMALLEST, LARGEST
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def caught_in_most(found: Sequence[float], share: float = CAUGHT) -> float | None:
    """Return the smallest error that is caught in this share of the runs; None if there are no runs."""
    return sorted(found)[number_of(share, len(found)) - 1] if found else None


def number_of(share: float, runs: int) -> int:
    """Return this share of the runs, rounded up: 99 % of 20 runs are 20."""
    return math.ceil(share * runs)


def _with(analysis: TraceAnalysis, trace: Trace) -> TraceAnalysis:
    # Errors change neither the samples nor the weights before a step, so what is right stays the same.
    other = TraceAnalysis(trace, analysis.workload, analysis.cell, analysis.behavior)
    other.expected, other.noise = analysis.expected, analysis.noise
    return other
