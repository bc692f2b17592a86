"""Where the GradScaler skipped a step, did everything stand still, and was there a reason to skip?"""

from __future__ import annotations

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.trace_analysis import TraceAnalysis


def skipped_steps(analysis: TraceAnalysis) -> Finding | None:
    """A skipped step had a gradient that is not finite; it leaves the weights still and lowers the scale.

    By which factor, and when the scale grows again, is the GradScaler's to say. None where no step was skipped.
    """
    count = 0
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            if not step.skipped:
                continue
            count += 1
            moved = [name for name in step.after if not torch.equal(step.before[name], step.after[name])]
            finite = all(bool(torch.isfinite(gradient).all()) for gradient in step.gradients.values())
            if moved or finite:
                what = f"{moved[0]} moved" if moved else "every gradient was finite"
                return Finding(
                    "skipped-steps", Outcome.FAILED, f"step {index} was skipped on rank {trace.rank}, yet {what}",
                    cause="moved-when-skipped" if moved else "skipped-for-nothing",
                    family="amp", step=index, parameter=moved[0] if moved else None, rank=trace.rank,
                )  # fmt: skip
            following = trace.steps[index + 1].scale if index + 1 < len(trace.steps) else None
            if following is not None and step.scale is not None and following >= step.scale:
                message = f"step {index} was skipped on rank {trace.rank}, and its scale of {step.scale:.0f} is kept"
                return Finding(
                    "skipped-steps", Outcome.FAILED, message, cause="scale-not-lowered", family="amp", step=index,
                    rank=trace.rank,
                )  # fmt: skip
    if count == 0:
        return None
    return Finding("skipped-steps", Outcome.PASSED, f"{count} skipped steps, over all ranks, left everything still")
