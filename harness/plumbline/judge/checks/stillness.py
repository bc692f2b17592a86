"""Do weights change by optimizer steps alone?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plumbline.core.finding import Finding
from plumbline.evidence.trace import RankTrace, Tensors
from plumbline.judge.causes.weights import ChangedWeightsCase
from plumbline.judge.findings import failed, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.trace_analysis import TraceAnalysis, same


def stillness(analysis: TraceAnalysis) -> Finding:
    """Between two steps, and after the last one, the weights stay bit for bit what the step before left."""
    for trace in analysis.trace.ranks:
        for index, left, found in _pauses(trace):
            if found is left or same(left, found):
                continue
            name = next((n for n in left if n not in found or not left[n].equal(found[n])), None)
            when = "the last step" if index == len(trace.steps) - 1 else "the step"
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


def _pauses(trace: RankTrace) -> Iterator[tuple[int, Tensors, Tensors]]:
    for index, (step, following) in enumerate(zip(trace.steps, trace.steps[1:], strict=False)):
        yield index, step.after, following.before
    if trace.steps and trace.final is not None:
        yield len(trace.steps) - 1, trace.steps[-1].after, trace.final
