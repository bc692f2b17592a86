"""Did the training really compute in the cell's precision, also with master weights?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from plumbline.core.finding import Finding
from plumbline.core.numbers import compact, x_noise
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.judge.oracle.noise import FALSE_ALARM, distance, in_noise
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

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
    finding = passed("precision", message)
    if not good:
        hint = f"run the forward {'in 16 bits' if masters else 'under autocast'}"
        finding = failed_with_hint("precision", message, hint, cause="trained-in-32-bits", family="amp")
    return replace(finding, error_x_noise=nearest)


def not_copied_back(analysis: TraceAnalysis) -> Finding | None:
    """Return the failure of the first step that the model began with weights other than the rounded master weights."""
    for step in analysis.recorded_steps:
        for rank, own in enumerate(step.ranks):
            off = own.off_masters
            if off:
                name = max(off, key=lambda one: off[one])
                return failed_with_hint(
                    "precision",
                    f"before this step, {len(off)} of {len(own.before)} parameters of the model differ from the "
                    "optimizer's master weights rounded to the nearest number, by up to "
                    f"{off[name]:.2g} of an entry,",
                    "copy the master weights to the model after each step",
                    cause="not-copied-back",
                    family="amp",
                    step=step.index,
                    rank=rank,
                    parameter=name,
                )
    return None


def summed_in_16_bits(analysis: TraceAnalysis) -> Finding | None:
    """Return the failure of a step whose gradients were summed in 16 bits although the subject declares float32.

    A sum of several 16-bit numbers in float32 is a 16-bit number only by chance. The same sum on one device shows how
    often that happens. The check fails only if no entry has more bits, and if that is less probable by chance than a
    false alarm.
    """
    if analysis.behavior.gradients != "float32" or analysis.workload.exact:
        return None
    for step in analysis.steps_taken:
        by_chance = 1.0
        for name, predicted in _summed_in_float32(analysis, step).items():
            own = step.ranks[0].gradients.get(name)
            if own is None:
                continue
            if not bool(_is_16_bit(own, analysis).all()):
                by_chance = 1.0
                break
            share = float(_is_16_bit(predicted, analysis).double().mean())
            by_chance *= share ** predicted.numel()
        if by_chance < FALSE_ALARM:
            return failed_with_hint(
                "precision",
                f"every entry of the gradients is a {analysis.cell.arithmetic.storage} number, "
                "although they are sums over several micro-batches or ranks,",
                "add them up in float32, as declared",
                cause="summed-in-16-bits",
                family="amp",
                step=step.index,
            )
    return None


def _summed_in_float32(analysis: TraceAnalysis, step: GlobalStep) -> dict[str, Tensor]:
    """Return the mean over the parts of a gradient, each in 16 bits, in float32; nothing if there is one part."""
    layout = analysis.layouts[step.index]
    if sum(map(len, layout)) < 2:
        return {}
    analysis.load_step(analysis.cell_oracle, step)
    parts = [
        [{name: value.float() for name, value in part.items()} for part in groups]
        for groups in analysis.cell_oracle.group_gradients(layout)
    ]
    return mean_gradient(parts)


def _is_16_bit(values: Tensor, analysis: TraceAnalysis) -> Tensor:
    dtype: torch.dtype = getattr(torch, analysis.cell.arithmetic.storage)
    return values.to(dtype).double() == values.double()


def begun_with_masters(analysis: TraceAnalysis) -> Iterator[GlobalStep]:
    """Yield the first step if rounding does not change its master weights.

    In later steps, a forward with the unrounded master weights has about as large an error as a forward in 16 bits.
    """
    first = analysis.steps_taken[0]
    if all(bool(_is_16_bit(value, analysis).all()) for value in first.ranks[0].before.values()):
        yield first
