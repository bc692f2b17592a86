"""Does every step use the learning rate that the workload's schedule has for it?"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from plumbline.core.finding import Finding
from plumbline.judge.causes.learning_rate import LearningRateCase
from plumbline.judge.causes.registry import explain
from plumbline.judge.findings import failed, passed
from plumbline.judge.trace_analysis import TraceAnalysis

PRECISION = 1e-12
"""Rates are float64 numbers that went through a few operations: this is thousands of roundings."""

ROUNDING = sys.float_info.epsilon / 2
"""One relative rounding of a float64 number: the noise of a rate in every precision."""


def learning_rate(analysis: TraceAnalysis) -> Finding:
    """The rates of all parameter groups at each step taken; a schedule advances after each of them.

    The trainer sets rates in float64 in every precision, so an error is a multiple of the rounding of float64.
    """
    optimizer = analysis.oracle.optimizer()
    schedule = analysis.oracle.schedule(optimizer)
    # Where a stage has nothing of an optimizer, it is not known which one that is.
    in_order = sorted if analysis.is_staged else list
    for global_step in analysis.steps_taken:
        expected = [float(group["lr"]) for group in optimizer.param_groups]
        for rank, step in enumerate(analysis.recorded_steps[global_step.index].ranks):
            used = list(step.learning_rates)
            if analysis.is_staged and (not step.before or (used and len(used) != len(expected))):
                continue  # a stage may have some of the optimizers, or none
            if rates_differ(in_order(used), in_order(expected)):
                message = f"the learning rate is {listed(used)} instead of the workload's {listed(expected)}"
                finding = replace(
                    failed("learning-rate", message, family="optimizer", step=global_step.index, rank=rank),
                    error_x_noise=_error(in_order(used), in_order(expected)) / ROUNDING,
                    limit_x_noise=PRECISION / ROUNDING,
                )
                return explain(finding, LearningRateCase(analysis, rank))
        analysis.oracle.set_gradients({})
        optimizer.step()  # without gradients it changes nothing; a schedule requires it
        schedule(analysis.standing_schedules(global_step))
    return passed("learning-rate", "every step used the workload's learning rate")


def rates_differ(used: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether the rates of the parameter groups differ by more than rounding."""
    return _error(used, expected) > PRECISION


def _error(used: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative error of a rate; infinite if a rate is missing, or not zero but should be."""
    if len(used) != len(expected):
        return math.inf
    return max((_relative(u, e) for u, e in zip(used, expected, strict=True)), default=0.0)


def _relative(used: float, expected: float) -> float:
    if used == expected:
        return 0.0
    error = abs(used - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(error) else error


def listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.13g}" for rate in rates) or "none"
