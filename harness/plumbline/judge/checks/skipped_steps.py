"""Where a step was skipped, did the weights stay, and was there a reason to skip?"""

from __future__ import annotations

import torch

from plumbline.core.finding import Finding
from plumbline.evidence.trace import Step
from plumbline.judge.findings import failed, passed
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis, same


def skipped_steps(analysis: TraceAnalysis) -> Finding | None:
    """A skipped step had a gradient that overflows; it leaves the weights unchanged and lowers the scale.

    Each of several optimizers may be skipped separately, which concerns only its own parameters. The loss scaler
    chooses the factor, and when the scale grows again. If a trainer has its own scaler, the gradients of skipped steps
    are not recorded. None if no step was skipped.
    """
    count = unseen = 0
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            if not step.skipped and not step.held_back:
                continue
            count += 1
            unseen += step.skipped and not step.gradients
            following = trace.steps[index + 1].scale if index + 1 < len(trace.steps) else None
            if (flaw := _flaw(step, following)) is not None:
                cause, observed, parameter = flaw
                return failed(
                    "skipped-steps",
                    f"the loss scaler skipped a step, but {observed}",
                    cause=cause,
                    family="amp",
                    step=index,
                    rank=trace.rank,
                    parameter=parameter,
                )
    if count == 0:
        return None
    for global_step in analysis.steps:
        if _overflowed(global_step) and not analysis.may_overflow(global_step):
            return _without_reason(global_step)
    message = f"the weights did not change in {count} skipped step{'s' if count > 1 else ''}, counted over all ranks"
    return passed("skipped-steps", f"{message}; the gradients of {unseen} were not recorded" if unseen else message)


def _overflowed(global_step: GlobalStep) -> bool:
    """Return whether all ranks skipped a step whose gradients and scale are known."""
    return all(step.skipped and step.gradients and step.scale for step in global_step.ranks)


def _without_reason(global_step: GlobalStep) -> Finding:
    rank, parameter = next(
        (rank, name)
        for rank, step in enumerate(global_step.ranks)
        for name, gradient in step.gradients.items()
        if not torch.isfinite(gradient).all()
    )
    return failed(
        "skipped-steps",
        "the loss scaler skipped a step whose gradient is not finite, although at its scale of "
        f"{global_step.ranks[0].scale:.0f} one device's gradient is far from overflowing: zero the gradients after "
        "skipped steps too",
        cause="skipped-without-overflow",
        family="amp",
        step=global_step.index,
        rank=rank,
        parameter=parameter,
    )


def _flaw(step: Step, following: float | None) -> tuple[str, str, str | None] | None:
    """Return the cause, the observation and the parameter if a skipped step is wrong."""
    gradients, still = (step.held_back, step.held_back) if step.held_back else (step.gradients, step.after)
    # A weight that was NaN before and is NaN now did not move.
    moved = [name for name in still if not same({name: step.before[name]}, {name: step.after[name]})]
    if moved:
        return "moved-when-skipped", f"{len(moved)} of {len(still)} parameters changed", moved[0]
    if gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
        return "skipped-for-nothing", "every gradient was finite", None
    if following is not None and step.scale is not None and following >= step.scale:
        return "scale-not-lowered", f"its scale of {step.scale:.0f} was {following:.0f} at the next step", None
    return None
