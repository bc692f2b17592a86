"""Do ranks start from the job's weights, hold equal weights after every step, and change them only by steps?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import RankTrace, Tensors, TraceStep, same
from plumbline.judge.causes.weights import ChangedWeightsCase, DivergedRanksCase, InitialWeightsCase
from plumbline.judge.checks.skipped_steps import decided_alone, skipped_on_some_ranks
from plumbline.judge.findings import Vacuous, error_at, failed, from_deviation, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, largest, limit, rounding_unit
from plumbline.judge.trace_analysis import TraceAnalysis, differing


def initial_weights(analysis: TraceAnalysis) -> Finding:
    """The weights before the first step equal ``job.model()``'s bit for bit."""
    if not analysis.steps:
        raise Vacuous("no optimizer step was seen")
    for rank, step in enumerate(analysis.steps[0].ranks):
        for name, parameter in analysis.start.items():
            value = step.before.get(name)
            if value is None or not value.equal(parameter):
                problem = "is missing" if value is None else "differs from the job's"
                message = f"before the first step, a parameter {problem}"
                finding = failed(
                    "initial-weights", message, family="sync", rank=analysis.holder(rank, name), parameter=name
                )
                return explain(finding, InitialWeightsCase(analysis))
    # Where several ranks are judged as one, each of them must start with the job's weights.
    for rank, step in enumerate(analysis.recorded_steps[0].ranks):
        for name, value in step.before.items():
            if name in analysis.start and not value.equal(analysis.start[name]):
                message = "before the first step, a parameter differs from the job's"
                finding = failed("initial-weights", message, family="sync", rank=rank, parameter=name)
                return explain(finding, InitialWeightsCase(analysis))
    return passed("initial-weights", "every rank starts from the job's weights")


def ranks_agree(analysis: TraceAnalysis) -> Finding | None:
    """Compare the weights after each step with rank 0's; if one rank skipped, all must. None in a world of one.

    If ranks hold one model together, the first rank that has a weight takes the place of rank 0.
    """
    if analysis.cell.processes == 1:
        return None
    for global_step in analysis.recorded_steps:
        ranks = {rank: TraceStep(rank, global_step.index, step=step) for rank, step in enumerate(global_step.ranks)}
        if (flaw := skipped_on_some_ranks(ranks, "ranks-agree")) is not None:
            return flaw
        alone = [rank for rank, step in enumerate(global_step.ranks) if step.held_back.keys() != global_step.held_back]
        if alone and not analysis.is_staged:
            observed = "an optimizer was held back on some ranks and took its step on others"
            return decided_alone(observed, global_step.index, alone[0], "ranks-agree")
    worst = largest(_distances(analysis))
    if worst.x_noise <= limit():
        message = f"all ranks hold the same weights after every step: {error_at(worst, limit())}"
        return from_deviation("ranks-agree", Outcome.PASSED, message, worst)
    message = f"weights after the step are not those of rank 0: {error_at(worst, limit())}"
    return explain(from_deviation("ranks-agree", Outcome.FAILED, message, worst), DivergedRanksCase(analysis))


def _distances(analysis: TraceAnalysis) -> Iterator[Deviation]:
    taken = (step for step in analysis.recorded_steps if not step.skipped)
    for global_step, rank, step in differing(taken, "after"):
        for name, value in step.after.items() if rank else ():
            reference = analysis.steps[global_step.index].ranks[0].after[name]
            if analysis.is_staged and value.equal(step.before[name]):
                value = _afterwards(analysis, global_step.index, rank).get(name, value)
            unit = rounding_unit([reference.double()], analysis.weight_epsilon)
            yield Deviation(in_noise(distance(value, reference), unit), global_step.index, name, rank)


def _afterwards(analysis: TraceAnalysis, index: int, rank: int) -> Tensors:
    """Return the weights with which a rank continues after a step.

    If several ranks hold a weight, one of them can take the step and send the result to the others, whose optimizers do
    not change the weight.
    """
    if index + 1 < len(analysis.recorded_steps):
        return analysis.recorded_steps[index + 1].ranks[rank].before
    return analysis.recorded.ranks[rank].final or {}


def stillness(analysis: TraceAnalysis) -> Finding:
    """Between two steps, and after the last one, the weights must stay bit for bit as the previous step left them."""
    for trace in analysis.trace.ranks:
        for index, left, found in _pauses(trace):
            if found is left or same(left, found):
                continue
            is_last = index == len(trace.steps) - 1
            rounded = _as_rounded_elsewhere(left, found, analysis) if is_last else {}
            differing = (n for n in left if n not in found or not (left | rounded)[n].equal(found[n]))
            name = next(differing, None)
            if name is None and rounded:
                continue
            when = "the last step" if is_last else "the step"
            finding = failed(
                "stillness",
                f"weights changed after {when} without an optimizer step",
                family="optimizer",
                step=index,
                rank=analysis.holder(trace.rank, name),
                parameter=name,
            )
            explained = explain(finding, ChangedWeightsCase(analysis))
            return replace(explained, rank=finding.rank) if analysis.is_staged else explained
    return passed("stillness", "weights changed by optimizer steps alone")


def _as_rounded_elsewhere(left: Tensors, found: Tensors, analysis: TraceAnalysis) -> Tensors:
    """Return the weights as ranks without the master weights have them at the end: rounded to the storage dtype."""
    dtype: torch.dtype = getattr(torch, analysis.cell.arithmetic.storage)
    if analysis.cell.arithmetic.masters is None or not analysis.is_staged:
        return {}
    return {name: left[name].to(dtype) for name, value in found.items() if name in left and value.dtype is dtype}


def _pauses(trace: RankTrace) -> Iterator[tuple[int, Tensors, Tensors]]:
    for index, (step, following) in enumerate(zip(trace.steps, trace.steps[1:], strict=False)):
        yield index, step.after, following.before
    if trace.steps and trace.final is not None:
        yield len(trace.steps) - 1, trace.steps[-1].after, trace.final
