"""Does training start from the job's weights, on every rank?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes import explain
from harness.judge.causes.weights import InitialWeightsCase
from harness.judge.error_outcome import Vacuous
from harness.judge.trace_analysis import TraceAnalysis


def initial_weights(analysis: TraceAnalysis) -> Finding:
    """The weights before the first step equal ``job.model()``'s bit for bit."""
    if not analysis.moments:
        raise Vacuous("no optimizer step was seen")
    for rank, step in enumerate(analysis.moments[0].ranks):
        for name, parameter in analysis.start.items():
            value = step.before.get(name)
            if value is None or not value.equal(parameter):
                what = "is missing" if value is None else "is not the job's"
                message = f"before the first step {name} {what} on rank {rank}"
                finding = Finding("initial-weights", Outcome.FAILED, message, family="sync", parameter=name, rank=rank)
                return explain(finding, InitialWeightsCase(analysis))
    return Finding("initial-weights", Outcome.PASSED, "every rank starts from the job's weights")
