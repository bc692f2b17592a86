"""Several optimizers, one of which got other gradients than it should."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.mistakes.gradient_case import GradientMistake
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
    """Predict that a backward made for one optimizer stays in the gradients of the others until they step.

    Gradients from backward passes after an optimizer's own step remain until its next step. Where all passes come
    before the first step, every optimizer gets their sum.
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
    """Predict one optimizer's gradients with the right direction, and whatever length they have if it is less."""
    right, observed = case.expected.contract, case.observed
    optimizers = case.counterfactuals.parameters_of_optimizers()
    for names in optimizers if len(optimizers) > 1 and case.clip_norm is None else ():
        own = {name: value for name, value in right.items() if name in names}
        due, found = length(own), length({name: observed[name] for name in own})
        if 0 < found < due:
            yield {**right, **scaled(found / due, own)}


HYPOTHESES = (
    GradientHypothesis("left-in-by-another-optimizer", "optimizer", _passes_left_in,
        "the sum over the backward passes that were made for several optimizers",
        "zero all gradients between the optimizers' backward passes: each needs those of its own", 450),
    _of_one(PREVIOUS_STEP_NOT_ZEROED, 440),
    *(_of_one(hypothesis, 430 - 10 * place) for place, hypothesis in enumerate(LATE)),
    GradientHypothesis("clipped-in-one-optimizer", "clipping", _shortened,
        "right for one optimizer, and for another right in direction but too short",
        "the workload does not clip: does the trainer, for one of the optimizers?", 90),
)  # fmt: skip
