"""If a GradScaler skipped a step, did the weights stay unchanged, did all ranks skip it, and was there a reason?"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from plumbline.core.finding import Finding
from plumbline.core.numbers import counted, scale_text
from plumbline.evidence.training_record import SkippedStep, StepRecord
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.judge.oracle.layout import draws
from plumbline.judge.oracle.noise import is_finite
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

CHECK = "skipped-steps"


def skipped_steps(analysis: TraceAnalysis) -> Finding | None:
    """A skipped step must have a gradient that overflows, leave the weights unchanged, and lower the scale.

    Each of several optimizers can be skipped separately, which affects only its own parameters. The loss scaler chooses
    by which factor the scale falls, and when it grows again. If a trainer has its own scaler, the gradients of skipped
    steps are not recorded. None if no step was skipped.
    """
    skipped: list[SkippedStep] = []
    for one in (one for trace in analysis.trace.ranks for one in trace.skipped_steps):
        if (flaw := moved_when_skipped(one) or skipped_for_nothing([one]) or scale_not_lowered(one)) is not None:
            return flaw
        skipped.append(one)
    if not skipped:
        return None
    for global_step in analysis.steps:
        if _overflowed(global_step) and not _may_overflow(global_step, analysis):
            return _without_reason(global_step)
    return passed_with(
        len(skipped),
        sum(len(trace.steps) for trace in analysis.trace.ranks),
        ranks=len(analysis.trace.ranks),
        unseen=sum(one.overflowed is None for one in skipped),
    )


def moved_when_skipped(one: SkippedStep) -> Finding | None:
    if not one.moved:
        return None
    return _failed(
        f"the loss scaler skipped a step, but {one.moved} changed",
        "leave weights and optimizer state unchanged when a step is skipped",
        "moved-when-skipped",
        one.number,
        one.rank,
        one.parameter,
    )


def skipped_for_nothing(ranks: Collection[SkippedStep]) -> Finding | None:
    """Return the failure if no gradient overflowed on any of these ranks, which decide together."""
    if not all(one.overflowed is False for one in ranks):
        return None
    first = next(iter(ranks))
    return _failed(
        "the loss scaler skipped a step although every gradient was finite",
        "check how overflows are detected",
        "skipped-for-nothing",
        first.number,
        first.rank,
    )


def scale_not_lowered(one: SkippedStep) -> Finding | None:
    if one.scale is None or one.next_scale is None or one.next_scale < one.scale:
        return None
    return _failed(
        f"the loss scaler skipped a step, but its scale of {scale_text(one.scale)} was {scale_text(one.next_scale)} at "
        "the next step",
        "call scaler.update() after skipped steps too",
        "scale-not-lowered",
        one.number,
        one.rank,
    )


def skipped_without_overflow(number: int, rank: int, parameter: str, evidence: str) -> Finding:
    """Return the failure of a step whose gradient is not finite, although ``evidence`` says that it should be."""
    return _failed(
        f"the loss scaler skipped a step because a gradient is not finite, although {evidence}",
        "call zero_grad() after a skipped step too",
        "skipped-without-overflow",
        number,
        rank,
        parameter,
    )


def skipped_on_some_ranks(ranks: Mapping[int, StepRecord], check: str) -> Finding | None:
    """Return the failure if some ranks skipped a step that others took."""
    skipped = [one for one in ranks.values() if one.skipped]
    if len(skipped) in (0, len(ranks)):
        return None
    return decided_alone(
        f"{len(skipped)} of {len(ranks)} ranks skipped the step and the others took it",
        skipped[0].number,
        skipped[0].rank,
        check,
    )


def decided_alone(observed: str, number: int, rank: int, check: str) -> Finding:
    hint = "check for overflows after the all-reduce, so that all ranks decide alike"
    return _failed(observed, hint, "overflow-decided-alone", number, rank, check=check)


def passed_with(skipped: int, steps: int, *, ranks: int, unseen: int = 0) -> Finding:
    """Return the finding that nothing is wrong with these skipped steps; the gradients of ``unseen`` are unknown."""
    message = f"the loss scaler skipped {skipped} of {counted(steps, 'step')}"
    message += " (of all ranks together)" if ranks > 1 else ""
    return passed(CHECK, f"{message}; the gradients of {unseen} were not recorded" if unseen else message)


def _failed(
    observed: str,
    hint: str,
    cause: str,
    number: int,
    rank: int,
    parameter: str | None = None,
    check: str = CHECK,
) -> Finding:
    return failed_with_hint(
        check, observed, hint, cause=cause, family="amp", step=number, rank=rank, parameter=parameter
    )


def _may_overflow(step: GlobalStep, analysis: TraceAnalysis) -> bool:
    """Say whether a right trainer's gradient may overflow at a step, in the cell's precision and at its loss scale.

    If a trainer divides after the backward, its gradient can be one device's times the number of samples in the
    step, and the order of summation can double an intermediate sum.
    """
    layout = analysis.layout(step)
    scale = (step.ranks[0].scale or 1.0) * 2 * len(draws(layout))
    analysis.load_step(analysis.cell_oracle, step)
    parts = analysis.cell_oracle.group_gradients(layout, scale)
    return not all(is_finite(part) for groups in parts for part in groups)


def _overflowed(global_step: GlobalStep) -> bool:
    return all(step.skipped and step.gradients and step.scale for step in global_step.ranks)


def _without_reason(global_step: GlobalStep) -> Finding:
    rank, parameter = next(
        (rank, name)
        for rank, step in enumerate(global_step.ranks)
        for name, gradient in step.gradients.items()
        if not torch.isfinite(gradient).all()
    )
    evidence = f"at its scale of {global_step.ranks[0].scale:.0f} one device's gradient is far from overflowing"
    return skipped_without_overflow(global_step.index, rank, parameter, evidence)
