"""Did the training really compute in the cell's precision?"""

from __future__ import annotations

import torch

from plumbline.core.finding import Finding
from plumbline.core.numbers import compact, x_noise
from plumbline.core.outcome import Outcome
from plumbline.judge.checks.master_weights import begun_with_masters, not_copied_back, summed_in_16_bits
from plumbline.judge.oracle.noise import distance, in_noise
from plumbline.judge.trace_analysis import TraceAnalysis

COARSE = 100.0
"""A tensor distinguishes 16 bits from 32 if 16-bit noise is at least this many roundings of 32 bits."""


def precision(analysis: TraceAnalysis) -> Finding | None:
    """A 16-bit training must have 16-bit errors. None in 32 and 64 bits, and if no tensor could show the difference.

    An exact workload cannot show it either, because few of its numbers need any rounding, even in 16 bits.

    A forward in 16 bits has an error as large as the noise; one in 32 bits has a few roundings of 32 bits. The border
    is the geometric mean of the two. Only measured rounding counts: an operation that autocast leaves in 32 bits may
    not show all the rounding that is possible. With master weights, only the first step can tell.
    """
    masters = analysis.cell.arithmetic.masters is not None
    if masters and (flaw := not_copied_back(analysis) or summed_in_16_bits(analysis)):
        return flaw
    mixed = masters or analysis.cell.arithmetic.autocast is not None
    if not mixed or analysis.workload.exact or not analysis.steps_taken:
        return None
    finer = analysis.weight_epsilon / analysis.epsilon
    nearest, border, place = 0.0, 0.0, ""
    for global_step in begun_with_masters(analysis) if masters else analysis.steps_taken:
        expected = analysis.expected[global_step.index]
        given = global_step.ranks[0].gradients
        for name, unit in expected.units.items():
            noise, unit = analysis.noise.measured(name, unit), unit * finer
            if unit == 0 or noise < COARSE * unit or name not in given:
                continue
            error = min(
                in_noise(distance(given[name], right.get(name, torch.zeros_like(given[name]))), noise)
                for right in (expected.contract, *expected.one_device)
            )
            line = (unit / noise) ** 0.5
            if not place or error / line > nearest / border:
                nearest, border, place = error, line, f"at step {global_step.index} in {name}"
    if not place:
        return None
    good = nearest > border
    message = (
        f"gradients have {'the' if good else 'smaller'} rounding errors {'of' if good else 'than'} "
        f"{analysis.cell.precision}: the largest is {x_noise(nearest)} (expected at least {compact(border)}) {place}"
    )
    return Finding(
        "precision",
        Outcome.PASSED if good else Outcome.FAILED,
        message if good else f"{message}: run the forward {'in 16 bits' if masters else 'under autocast'}",
        cause=None if good else "trained-in-32-bits",
        family=None if good else "amp",
        error_x_noise=nearest,
    )
