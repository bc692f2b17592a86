"""Do all ranks hold the same weights after every step?"""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import TraceStep
from plumbline.judge.causes.weights import DivergedRanksCase
from plumbline.judge.checks.skipped_steps import decided_alone, skipped_on_some_ranks
from plumbline.judge.findings import error_at, from_deviation
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, largest, limit, rounding_unit
from plumbline.judge.trace_analysis import TraceAnalysis, differing

CHECK = "ranks-agree"


def ranks_agree(analysis: TraceAnalysis) -> Finding | None:
    """Compare the weights after each step with rank 0's; if one rank skipped, all must. None in a world of one.

    If ranks hold one model together, the first rank that has a weight takes the place of rank 0.
    """
    if analysis.cell.processes == 1:
        return None
    for global_step in analysis.recorded_steps:
        ranks = {rank: TraceStep(rank, global_step.index, step=step) for rank, step in enumerate(global_step.ranks)}
        if (flaw := skipped_on_some_ranks(ranks, CHECK)) is not None:
            return flaw
        alone = [rank for rank, step in enumerate(global_step.ranks) if step.held_back.keys() != global_step.held_back]
        if alone and not analysis.is_staged:
            observed = "an optimizer was held back on some ranks and took its step on others"
            return decided_alone(observed, global_step.index, alone[0], CHECK)
    worst = largest(_errors(analysis))
    if worst.x_noise <= limit():
        message = f"all ranks hold the same weights after every step: {error_at(worst, limit())}"
        return from_deviation(CHECK, Outcome.PASSED, message, worst)
    message = f"weights after the step are not those of rank 0: {error_at(worst, limit())}"
    return explain(from_deviation(CHECK, Outcome.FAILED, message, worst), DivergedRanksCase(analysis))


def _errors(analysis: TraceAnalysis) -> Iterator[Deviation]:
    taken = (step for step in analysis.recorded_steps if not step.skipped)
    for global_step, rank, step in differing(taken, "after"):
        for name, value in step.after.items() if rank else ():
            reference = analysis.steps[global_step.index].ranks[0].after[name]
            unit = rounding_unit([reference.double()], analysis.epsilon)
            yield Deviation(in_noise(distance(value, reference), unit), global_step.index, name, rank)
