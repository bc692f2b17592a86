"""Do all ranks hold the same weights after every step?"""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.causes.registry import explain
from plumbline.judge.causes.weights import DivergedRanksCase
from plumbline.judge.findings import error_at, failed, from_deviation
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, largest, limit, rounding_unit
from plumbline.judge.trace_analysis import TraceAnalysis, differing


def ranks_agree(analysis: TraceAnalysis) -> Finding | None:
    """Compare the weights after each step with rank 0's; if one rank skipped, all must. None in a world of one.

    If ranks hold one model together, the first rank that has a weight takes the place of rank 0.
    """
    if analysis.cell.processes == 1:
        return None
    for global_step in analysis.recorded_steps:
        skipped = [rank for rank, step in enumerate(global_step.ranks) if step.skipped]
        if 0 < len(skipped) < len(global_step.ranks):
            return failed(
                "ranks-agree",
                f"{len(skipped)} of {len(global_step.ranks)} ranks skipped the step and the others took it",
                cause="overflow-decided-alone",
                family="amp",
                step=global_step.index,
                rank=skipped[0],
            )
        alone = [rank for rank, step in enumerate(global_step.ranks) if step.held_back.keys() != global_step.held_back]
        if alone and not analysis.is_staged:
            return failed(
                "ranks-agree",
                "an optimizer was held back on some ranks and took its step on others",
                cause="overflow-decided-alone",
                family="amp",
                step=global_step.index,
                rank=alone[0],
            )
    worst = largest(_errors(analysis))
    if worst.x_noise <= limit():
        message = f"all ranks hold the same weights after every step: {error_at(worst, limit())}"
        return from_deviation("ranks-agree", Outcome.PASSED, message, worst)
    message = f"weights after the step are not those of rank 0: {error_at(worst, limit())}"
    return explain(from_deviation("ranks-agree", Outcome.FAILED, message, worst), DivergedRanksCase(analysis))


def _errors(analysis: TraceAnalysis) -> Iterator[Deviation]:
    taken = (step for step in analysis.recorded_steps if not step.skipped)
    for global_step, rank, step in differing(taken, "after"):
        for name, value in step.after.items() if rank else ():
            reference = analysis.steps[global_step.index].ranks[0].after[name]
            unit = rounding_unit([reference.double()], analysis.epsilon)
            yield Deviation(in_noise(distance(value, reference), unit), global_step.index, name, rank)
