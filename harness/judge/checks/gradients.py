"""Is the gradient that the optimizer was handed the right one?"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Step, Tensors
from harness.judge.causes import explain_gradients
from harness.judge.error_outcome import Deviation, Vacuous, found, larger, nearest
from harness.judge.oracle.noise import TOGETHER, distance, error_along, in_noise, norm
from harness.judge.trace_analysis import ExpectedGradients, TraceAnalysis

PROMISE = "the backend promises for these shares"


def gradients(analysis: TraceAnalysis) -> Finding:
    """Each rank's gradient at each step, at the subject's own weights and samples, against ℓ(B) and the contract."""
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was seen on every rank")
    _refuse_blindness(analysis)
    contract: Deviation | None = None
    # One device may take the micro-batches one by one or all samples at once; a trainer keeps to one of them.
    one_device: dict[int, Deviation] = {}
    gaps: dict[int, float] = {}
    for global_step, rank, step in analysis.differing_ranks("gradients"):
        truth = analysis.expected[global_step.index]
        for name, promised in truth.contract.items():
            noise = analysis.noise.at(name, truth.units[name])
            given = step.gradients.get(name, torch.zeros_like(promised))
            place = (global_step.index, name, rank)
            contract = larger(contract, Deviation(in_noise(distance(given, promised), noise), *place))
            for way, gradient in enumerate(truth.one_device):
                error = in_noise(distance(given, gradient[name]), noise)
                one_device[way] = larger(one_device.get(way), Deviation(error, *place))
                gaps[way] = max(gaps.get(way, 0.0), in_noise(distance(gradient[name], promised), noise))
        noise = analysis.noise.at(TOGETHER, math.hypot(*truth.units.values()))
        place = (global_step.index, TOGETHER, rank)
        along = in_noise(error_along(step.gradients, truth.contract), noise)
        contract = larger(contract, Deviation(along, *place))
        for way, gradient in enumerate(truth.one_device):
            along = in_noise(error_along(step.gradients, gradient), noise)
            one_device[way] = larger(one_device.get(way), Deviation(along, *place))
    assert contract is not None
    finding = nearest(
        "gradients",
        "gradients",
        whole=min(one_device.values(), key=lambda deviation: deviation.x_noise),
        contract=contract,
        gap=min(gaps.values()),
        limit=0.0 if analysis.exact else analysis.limit,
        promise=PROMISE,
    )
    if finding.outcome is Outcome.FAILED:
        return explain_gradients(finding, analysis)
    return _out_of_nowhere(analysis) or finding


def _out_of_nowhere(analysis: TraceAnalysis) -> Finding | None:
    """Return what is wrong where a parameter that no loss of the step depends on was handed a gradient.

    One of zeros is a gradient too, where decay makes something of it: a parameter whose first gradient is yet to come
    has none, and stays still. Later on zeros may be what is left of an earlier step.
    """
    for global_step, rank, step in analysis.differing_ranks("gradients"):
        for name in step.gradients.keys() - analysis.expected[global_step.index].contract.keys():
            frozen = name not in analysis.oracle.trained
            if norm(step.gradients[name]):
                what = f"which is {'frozen' if frozen else 'unused in this step'}"
            elif not frozen and name not in _used_until(global_step.index, analysis) and not _still(name, step):
                what = "all zeros, and it moved, although no loss has depended on it yet"
            else:
                continue
            message = f"at step {global_step.index} rank {rank} was handed a gradient of {name}, {what}"
            finding = found("gradients", Outcome.FAILED, message, Deviation(math.inf, global_step.index, name, rank))
            if frozen:
                return replace(finding, cause="frozen-parameter-trained", family="optimizer")
            return replace(finding, cause="unused-parameter-moved", family="unused-params")
    return None


def _still(name: str, step: Step) -> bool:
    return step.after[name].equal(step.before[name])


def _used_until(index: int, analysis: TraceAnalysis) -> set[str]:
    """Return the parameters on which some loss has depended up to a step."""
    return {name for step, truth in analysis.expected.items() if step <= index for name in truth.contract}


def _refuse_blindness(analysis: TraceAnalysis) -> None:
    """Raise where even a wrong trainer would have passed."""
    truths = analysis.expected.values()
    if all(norm(value) == 0 for truth in truths for value in truth.contract.values()):
        raise Vacuous("every gradient is zero")
    several = [truth for truth in truths if sum(len(groups) for groups in truth.parts) > 1]
    if several and not any(_shares_differ(truth, analysis) for truth in several):
        raise Vacuous("every share has the same gradient, so a missing average would not be seen")


def _shares_differ(truth: ExpectedGradients, analysis: TraceAnalysis) -> bool:
    parts: list[Tensors] = [part for groups in truth.parts for part in groups]
    return any(
        # Numbers that are not finite are no reason to call the check blind.
        not distance(part[name], mean) <= analysis.limit * analysis.noise.at(name, truth.units[name])
        for name, mean in truth.raw.items()
        for part in parts
        if name in part
    )
