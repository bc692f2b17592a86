"""Did the optimizer update the weights as the workload's optimizer does with the same gradients?"""

from __future__ import annotations

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import RankTrace, same
from plumbline.judge.causes.update import update_case
from plumbline.judge.findings import Vacuous, compare_with_one, failed_with_hint, with_error_grid, with_parameters
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.noise import Deviation, largest, limit
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.judge.update_replay import may_sum_in_parts, stepped_shard_by_shard, update_errors


def update(analysis: TraceAnalysis) -> Finding:
    """Replay the subject's own gradients through the workload's optimizer and compare the weights after each step.

    The replay computes the optimizer's state from the subject's gradients, so a lost state shows. Noise is the error of
    the same replay in the cell's storage precision, and at least one rounding; if that does not explain the error, the
    optimizer's matrix products are also summed in parts.
    """
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was taken on all ranks")
    finding = compare_updates(analysis)
    if finding.outcome is not Outcome.FAILED:
        if not any(
            not torch.equal(step.before[name], step.after[name])
            for global_step in analysis.steps_taken
            for step in global_step.ranks
            for name in step.after
        ):
            raise Vacuous("no weight moved at any step")
        return _shard_by_shard(analysis) or finding
    case = update_case(finding, analysis)
    return finding if case is None else explain(finding, case)


def _shard_by_shard(analysis: TraceAnalysis) -> Finding | None:
    """Return the failure of a matrix optimizer that stepped single shards, if the noise of partial sums hides it."""
    trace = analysis.trace.ranks[0]
    if not may_sum_in_parts(trace, analysis, analysis.allowed(limit())) or not stepped_shard_by_shard(trace, analysis):
        return None
    return failed_with_hint(
        "update",
        "each update is that of an optimizer that sees only one rank's shard of a parameter",
        "give an optimizer that combines the entries of a matrix whole matrices, or DTensors",
        cause="stepped-shard-by-shard",
        family="optimizer",
        step=analysis.steps_taken[0].index,
    )


def compare_updates(analysis: TraceAnalysis) -> Finding:
    """Return the result of the comparison, without a cause."""
    errors: list[Deviation] = []
    judged: list[RankTrace] = []
    allowed = analysis.allowed(limit())
    for trace in analysis.trace.ranks:
        if not any(_same_history(trace, other) for other in judged):
            judged.append(trace)
            errors += update_errors(trace, analysis, allowed)
    expected = "those of the workload's optimizer applied to the recorded gradients"
    finding = compare_with_one("update", "weights after the step", expected, largest(errors), allowed)
    finding = with_error_grid(finding, errors)
    return with_parameters(finding, errors) if finding.outcome is Outcome.FAILED else finding


def _same_history(left: RankTrace, right: RankTrace) -> bool:
    return len(left.steps) == len(right.steps) and all(
        same(a.before, b.before) and same(a.gradients, b.gradients) and same(a.after, b.after)
        for a, b in zip(left.steps, right.steps, strict=True)
    )
