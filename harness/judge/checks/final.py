"""Does training end with the weights that the last step left?"""

from __future__ import annotations

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.examination import Examination


def final_weights(examination: Examination) -> Finding | None:
    """Nothing touches the weights after the last optimizer step, on any rank. None where the end was not recorded."""
    for trace in examination.trace.ranks:
        if trace.final is None or not trace.steps:
            return None
        after = trace.steps[-1].after
        for name, value in after.items():
            end = trace.final.get(name)
            if end is None or not torch.equal(end, value):
                return Finding(
                    "final-weights",
                    Outcome.FAILED,
                    f"on rank {trace.rank} {name} changed after the last optimizer step",
                    cause="changed-after-the-last-step",
                    family="optimizer",
                    parameter=name,
                    rank=trace.rank,
                )
    return Finding("final-weights", Outcome.PASSED, "training ends with the weights of the last step")
