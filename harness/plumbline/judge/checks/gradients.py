"""Is the gradient that the optimizer got the right one?"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Step, Tensors
from plumbline.judge.causes.gradient_evidence import explain_gradients
from plumbline.judge.error_grid import with_error_grid
from plumbline.judge.findings import TwoWayComparison, Vacuous, failed
from plumbline.judge.oracle.noise import TOGETHER, Deviation, distance, error_along, in_noise, norm
from plumbline.judge.trace_analysis import ExpectedGradients, TraceAnalysis

PROMISE = "what the backend promises for these samples"


def gradients(analysis: TraceAnalysis) -> Finding:
    """Each rank's gradient at each step, at the subject's own weights and samples, against ℓ(B) and the contract."""
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was taken on all ranks")
    _refuse_vacuous(analysis)
    finding = compare_gradients(analysis)
    if finding.outcome is Outcome.FAILED:
        return explain_gradients(finding, analysis)
    undue = _undue_gradient(analysis)
    return finding if undue is None else replace(undue, error_grid=finding.error_grid)


def compare_gradients(analysis: TraceAnalysis) -> Finding:
    """Return the result of the comparison, without a cause."""
    # One device may take the micro-batches one by one or all samples at once.
    comparison = TwoWayComparison()
    errors: list[Deviation] = []
    for global_step, rank, step in analysis.differing_ranks("gradients"):
        expected = analysis.expected[global_step.index]
        for name, promised in expected.contract.items():
            given = step.gradients.get(name, torch.zeros_like(promised))
            ways = [gradient[name] for gradient in expected.one_device]
            at = Deviation(0.0, global_step.index, name, analysis.holder(rank, name))
            noise = analysis.noise.at(name, expected.units[name])
            off, *others = (distance(given, right) for right in (promised, *ways))
            comparison.add(at, noise, off, others, [distance(way, promised) for way in ways])
            errors.append(replace(at, x_noise=in_noise(min(off, *others), noise)))
        comparison.add(
            Deviation(0.0, global_step.index, TOGETHER, rank),
            analysis.noise.at(TOGETHER, math.hypot(*expected.units.values())),
            error_along(step.gradients, expected.contract),
            [error_along(step.gradients, way) for way in expected.one_device],
        )
    finding = comparison.finding("gradients", "gradients", PROMISE, analysis.allowed(analysis.limit))
    return with_error_grid(finding, errors)


def _undue_gradient(analysis: TraceAnalysis) -> Finding | None:
    """Return the failure where the optimizer got a gradient of a parameter that no loss of the step depends on.

    A gradient of zeros counts where weight decay makes something of it: a parameter without a gradient so far must not
    change. Later on zeros may be what is left of an earlier step.
    """
    for global_step, rank, step in analysis.differing_ranks("gradients"):
        for name in step.gradients:
            if name in analysis.expected[global_step.index].contract:
                continue
            frozen = name not in analysis.oracle.trained
            if norm(step.gradients[name]):
                what = f"of a parameter that is {'frozen' if frozen else 'unused in this step'}"
            elif not frozen and name not in _used_until(global_step.index, analysis) and not _still(name, step):
                what = "of zeros and moved a parameter that no loss has depended on so far"
            else:
                continue
            finding = failed(
                "gradients",
                f"the optimizer got a gradient {what}",
                cause="frozen-parameter-trained" if frozen else "unused-parameter-moved",
                family="optimizer" if frozen else "unused-params",
                step=global_step.index,
                rank=analysis.holder(rank, name),
                parameter=name,
            )
            return replace(finding, error_x_noise=math.inf)
    return None


def _still(name: str, step: Step) -> bool:
    return step.after[name].equal(step.before[name])


def _used_until(index: int, analysis: TraceAnalysis) -> set[str]:
    return {name for step, expected in analysis.expected.items() if step <= index for name in expected.contract}


def _refuse_vacuous(analysis: TraceAnalysis) -> None:
    """Raise where a wrong trainer would have passed too."""
    expected = analysis.expected.values()
    if all(norm(value) == 0 for each in expected for value in each.contract.values()):
        raise Vacuous("every gradient is zero")
    several = [each for each in expected if sum(len(groups) for groups in each.parts) > 1]
    if several and not any(_shares_differ(each, analysis) for each in several):
        raise Vacuous("all shares have the same gradient, so a missing average would not show")


def _shares_differ(expected: ExpectedGradients, analysis: TraceAnalysis) -> bool:
    parts: list[Tensors] = [part for groups in expected.parts for part in groups]
    return any(
        # Numbers that are not finite do not make the check vacuous.
        not distance(part[name], mean) <= analysis.limit * analysis.noise.at(name, expected.units[name])
        for name, mean in expected.raw.items()
        for part in parts
        if name in part
    )
