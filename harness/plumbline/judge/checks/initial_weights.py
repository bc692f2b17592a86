"""Does training start from the job's weights, on every rank?"""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.judge.causes.weights import InitialWeightsCase
from plumbline.judge.findings import Vacuous, failed, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.trace_analysis import TraceAnalysis


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
    # What several ranks hold that are judged as one is each of them's to begin with.
    for rank, step in enumerate(analysis.recorded_steps[0].ranks):
        for name, value in step.before.items():
            if name in analysis.start and not value.equal(analysis.start[name]):
                message = "before the first step, a parameter differs from the job's"
                finding = failed("initial-weights", message, family="sync", rank=rank, parameter=name)
                return explain(finding, InitialWeightsCase(analysis))
    return passed("initial-weights", "every rank starts from the job's weights")
