"""Optimizers that lack a parameter, or that get the gradients of another optimizer."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.mistakes.case import GradientMistake
from plumbline.judge.mistakes.synchronisation import LATE
from plumbline.judge.oracle.noise import length
from plumbline.judge.oracle.oracle import clipped


def _of_one(mistake: GradientMistake, specificity: float) -> GradientHypothesis:
    """Return the hypothesis that a mistake happened to one optimizer's gradients alone."""

    def predict(case: OracleGradientCase) -> Gradients:
        optimizers = case.counterfactuals.parameters_of_optimizers()
        for prediction in mistake.predict(case) if len(optimizers) > 1 else ():
            for wrong in () if isinstance(prediction, Match) else case.predicted(prediction):
                for names in optimizers:
                    yield {**case.expected.contract, **{name: value for name, value in wrong.items() if name in names}}

    return GradientHypothesis(
        f"{mistake.name}-in-one-optimizer",
        mistake.family,
        predict,
        f"right for one optimizer, and for another {mistake.description}",
        mistake.hint,
        specificity,
    )


def _passes_left_in(case: OracleGradientCase) -> Gradients:
    """Predict that one optimizer's backward stays in the gradients of the others until they step.

    Gradients from backward passes after an optimizer's step remain until its next step. If all passes come before the
    first step, every optimizer gets their sum.
    """
    turns, count = case.step.turns, len(case.counterfactuals.parameters_of_optimizers())
    if count > 1 and not turns:
        yield clipped(scaled(count, case.expected.raw), case.clip_norm)
    if not turns or case.clip_norm is not None:
        return
    made = case.counterfactuals.passes(case.index)
    before = case.counterfactuals.passes(case.index - 1) if case.index else []
    total = dict(case.expected.contract)
    for turn, names in enumerate(turns):
        for name in total.keys() & set(names):
            left = [*before[turn + 1 :], *made[: turn + 1]]
            total[name] = torch.stack([gradient[name] for gradient in left]).sum(0)
    yield total


def _shortened(case: OracleGradientCase) -> Gradients:
    right, observed = case.expected.contract, case.observed
    optimizers = case.counterfactuals.parameters_of_optimizers()
    for names in optimizers if len(optimizers) > 1 and case.clip_norm is None else ():
        own = {name: value for name, value in right.items() if name in names}
        due, found = length(own), length({name: observed[name] for name in own})
        if 0 < found < due:
            yield {**right, **scaled(found / due, own)}


def _absent(case: OracleGradientCase) -> Gradients:
    right, observed = case.expected.contract, case.step.gradients
    if any(name not in observed for name in right):
        yield {name: value for name, value in right.items() if name in observed}
        yield clipped({name: value for name, value in case.expected.raw.items() if name in observed}, case.clip_norm)


register(
    OracleGradientCase,
    GradientHypothesis("parameter-not-in-optimizer", "optimizer", _absent,
        "right, but some parameters had no gradient when the optimizer stepped",
        "check that the optimizer has all parameters, and that each has a gradient at the step", 940),
    GradientHypothesis("left-in-by-another-optimizer", "optimizer", _passes_left_in,
        "the sum over the backward passes of several optimizers",
        "zero all gradients between the optimizers' backward passes", 450),
    _of_one(PREVIOUS_STEP_NOT_ZEROED, 440),
    *(_of_one(hypothesis, 430 - 10 * index) for index, hypothesis in enumerate(LATE)),
    GradientHypothesis("clipped-in-one-optimizer", "clipping", _shortened,
        "right for one optimizer, and for another right in direction but too short",
        "check whether the trainer clips for one optimizer, although the workload does not", 90),
)  # fmt: skip
