"""Do all ranks hold the same weights after every step?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes import explain
from harness.judge.causes.weights import DivergedRanksCase
from harness.judge.error_outcome import Deviation, larger, times
from harness.judge.oracle.noise import distance, in_noise, limit, rounding_unit
from harness.judge.trace_analysis import DRAWS, TraceAnalysis


def ranks_agree(analysis: TraceAnalysis) -> Finding | None:
    """Weights after each step against rank 0's; where one rank skipped, all did. None in a world of one."""
    if analysis.cell.processes == 1:
        return None
    for moment in analysis.moments:
        skipped = [rank for rank, step in enumerate(moment.ranks) if step.skipped]
        if skipped and len(skipped) < len(moment.ranks):
            return Finding(
                "ranks-agree",
                Outcome.FAILED,
                f"at step {moment.index} ranks {skipped} skipped the step, the others took it",
                cause="overflow-decided-alone",
                family="amp",
                step=moment.index,
                rank=skipped[0],
            )
    worst = Deviation(0.0)
    for moment, rank, step in analysis.differing_ranks("after"):
        if rank == 0:
            continue
        reference = moment.ranks[0].after
        for name, value in step.after.items():
            unit = rounding_unit([reference[name].double()], analysis.epsilon)
            error = distance(value, reference[name])
            worst = larger(worst, Deviation(in_noise(error, unit), moment.index, name, rank))
    good = worst.x_noise <= limit(DRAWS)
    finding = Finding(
        "ranks-agree",
        Outcome.PASSED if good else Outcome.FAILED,
        f"all ranks hold the same weights after every step ({times(worst.x_noise)})"
        if good
        else f"rank {worst.rank} holds other weights than rank 0 ({times(worst.x_noise)}, {worst.where})",
        family=None if good else "sync",
        error_x_noise=worst.x_noise,
        step=worst.step,
        parameter=worst.parameter,
        rank=worst.rank,
    )
    return finding if good else explain(finding, DivergedRanksCase(analysis))
