"""Does every step use the right learning rate: the workload's for a subject, the other ranks' for a script?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plumbline.core.finding import Finding
from plumbline.evidence.training_record import StepRecord, TrainingRecord
from plumbline.judge.causes.learning_rate import EVERY_MICRO_BATCH, LearningRateCase, ScheduleCase
from plumbline.judge.findings import failed, passed
from plumbline.judge.hypothesis import explain, failed_by
from plumbline.judge.trace_analysis import TraceAnalysis

CHECK = "learning-rate"

PRECISION = 1e-12
"""Rates are float64 numbers that went through a few operations: this is thousands of roundings."""

ROUNDING = sys.float_info.epsilon / 2
"""One relative rounding of a float64 number: the noise of a rate in every precision."""

Rates = Sequence[float]
DueRates = Callable[[Mapping[int, StepRecord]], Mapping[int, Rates]]
"""Returns the rates that each rank should use in one step; ranks whose rates are unknown are left out."""


def learning_rate(analysis: TraceAnalysis) -> Finding:
    """The rates of all parameter groups at each step taken must be the workload's; schedules advance after each step.

    The trainer sets rates in float64 in every precision, so an error is a multiple of the rounding of float64.
    """
    wrong = wrong_rates(
        analysis, _workload_rates(analysis), "the workload's", lambda rank: ScheduleCase(analysis, rank)
    )
    return wrong or passed(CHECK, "every step used the workload's learning rate")


def wrong_rates(
    training: TrainingRecord,
    due: DueRates,
    whose: str,
    case_of: Callable[[int], LearningRateCase],
    precision: float = PRECISION,
) -> Finding | None:
    """Return the failure of the first step whose rates differ from the ``due`` ones; the message calls these ``whose``.

    ``precision``: the relative difference up to which two rates are the same number.
    """
    for ranks in training.steps_side_by_side:
        for rank, expected in due(ranks).items():
            one = ranks[rank]
            if (error := _error(one.learning_rates, expected)) > precision:
                message = f"the learning rate is {listed(one.learning_rates)} instead of {whose} {listed(expected)}"
                finding = replace(
                    failed(CHECK, message, family="optimizer", step=one.number, rank=rank),
                    error_x_noise=error / ROUNDING,
                    limit_x_noise=precision / ROUNDING,
                )
                return explain(finding, case_of(rank))
    return None


def moved_with_every_pass(training: TrainingRecord) -> Finding | None:
    """Return the failure of a schedule that advances between all backward passes of a step.

    Schedules that advance several times in one place, as Accelerate's do, do so on purpose.
    """
    for one in training.optimizer_steps:
        if one.passes > 1 and {*range(one.passes - 1)} <= {*one.schedule_moves}:
            message = f"the scheduler stepped between the {one.passes} backward passes"
            return failed_by(CHECK, message, EVERY_MICRO_BATCH, step=one.number, rank=one.rank)
    return None


def _workload_rates(analysis: TraceAnalysis) -> DueRates:
    """Return the workload's rates at each step taken.

    A pipeline stage can have only some of the optimizers, or none. Which ones it has is unknown, so rates are compared
    in ascending order.
    """
    optimizer = analysis.oracle.optimizer()
    schedule = analysis.oracle.schedule(optimizer)
    by_step: dict[int, list[float]] = {}
    analysis.oracle.set_gradients({})
    for global_step in analysis.steps_taken:
        by_step[global_step.index] = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()  # without gradients it changes nothing; a schedule requires it
        schedule(analysis.standing_schedules(global_step))

    def due(ranks: Mapping[int, StepRecord]) -> Mapping[int, Rates]:
        expected = by_step.get(next(iter(ranks.values())).number)
        if expected is None:
            return {}
        if not analysis.is_staged:
            return dict.fromkeys(ranks, expected)
        return {
            rank: _in_order_of(one.learning_rates, expected)
            for rank, one in ranks.items()
            if one.parameters and len(one.learning_rates) in (0, len(expected))
        }

    return due


def _in_order_of(used: Rates, expected: Rates) -> Rates:
    order = sorted(range(len(used)), key=used.__getitem__)
    return [rate for _, rate in sorted(zip(order, sorted(expected), strict=True))] if used else expected


def rates_differ(used: Rates, expected: Rates) -> bool:
    """Return whether the rates of the parameter groups differ by more than rounding."""
    return _error(used, expected) > PRECISION


def _error(used: Rates, expected: Rates) -> float:
    """Return the largest relative error of a rate; infinite if a rate is missing, or not zero but should be."""
    if len(used) != len(expected):
        return math.inf
    return max((_relative(u, e) for u, e in zip(used, expected, strict=True)), default=0.0)


def _relative(used: float, expected: float) -> float:
    if used == expected:
        return 0.0
    error = abs(used - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(error) else error


def listed(rates: Rates) -> str:
    return ", ".join(f"{rate:.13g}" for rate in rates) or "none"
