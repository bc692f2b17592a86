"""Where the GradScaler skipped a step, did everything stand still, and was there a reason to skip?"""

from __future__ import annotations

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.examination import Examination


def skipped_steps(examination: Examination) -> Finding | None:
    """A skipped step leaves the weights as they were and had a gradient that is not finite. None without any."""
    count = 0
    for trace in examination.trace.ranks:
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
    if count == 0:
        return None
    return Finding("skipped-steps", Outcome.PASSED, f"{count} skipped steps, over all ranks, left everything still")
