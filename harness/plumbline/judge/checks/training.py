"""Did the optimizer step as often as it should, and are the final weights those of a training on one device?"""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.causes.step_count import StepCountCase
from plumbline.judge.findings import TwoWayComparison, Vacuous, failed, passed
from plumbline.judge.full_training import FullTraining
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.noise import Deviation, distance
from plumbline.judge.trace_analysis import TraceAnalysis


def training(analysis: TraceAnalysis) -> Finding:
    """Train in float64 from the job's weights with the samples that the subject used, and compare the final weights.

    This is what the user wants to know.
    """
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was taken on all ranks")
    last = analysis.steps_taken[-1]
    full_training = analysis.once(FullTraining)
    contract = full_training.contract
    one_device = full_training.one_device.values()
    comparison = TwoWayComparison()
    for name, value in last.ranks[0].after.items():
        # Parameters that are not in the contract were added by the subject: not the job's, so not judged.
        if full_training.noise.get(name, 0.0) == 0:
            continue
        comparison.add(
            Deviation(0.0, last.index, name),
            full_training.noise[name],
            distance(value, contract[name]),
            [distance(value, weights[name]) for weights in one_device],
            [distance(weights[name], contract[name]) for weights in one_device],
        )
    if comparison.contract is None:
        raise Vacuous("every weight is zero at the end")
    promise = "those of a training under the backend's contract"
    return comparison.finding("training", "weights at the end", promise, analysis.allowed(full_training.limit))


def steps(analysis: TraceAnalysis) -> Finding:
    """Every rank must attempt one step for each window of every epoch, including the short last window."""
    expected = analysis.steps_due
    if not analysis.steps_taken and not (analysis.is_staged and any(trace.steps for trace in analysis.recorded.ranks)):
        raise Vacuous("no optimizer step was taken on all ranks, so there is nothing to compare")
    for trace in analysis.recorded.ranks:
        if len(trace.steps) != expected:
            message = f"{counted(len(trace.steps), 'optimizer step')} instead of {expected}"
            return explain(failed("steps", message, family="data", rank=trace.rank), StepCountCase(analysis))
    return passed("steps", f"{counted(expected, 'optimizer step')} on every rank")
