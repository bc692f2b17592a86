"""Gradients that are missing, stale or another parameter's, although the loss has a gradient for each parameter.

Optimizers can also lack a parameter, or get the gradients of another optimizer.
"""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import mean, scaled
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.mistakes.synchronisation import LATE, only
from plumbline.judge.oracle.noise import distance, length
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.truth import Combination, GradientMistake, SomeParameters


def _thrown_away(case: OracleGradientCase) -> Gradients:
    if names := case.unused & case.expected.raw.keys():
        yield {name: value for name, value in case.expected.contract.items() if name not in names}


def _averaged_over_users(case: OracleGradientCase) -> Gradients:
    if case.unused and case.micro_batches == 1 and case.clip_norm is None:
        (parts,) = case.expected.parts
        yield {name: mean([part for part in parts if name in part])[name] for name in case.expected.raw}


def _own_where_unused(case: OracleGradientCase) -> Gradients:
    if not case.unused or not (parts := case.own_parts(case.rank)):
        return
    own, right = mean_gradient(parts), case.expected.contract
    yield {
        name: own.get(name, torch.zeros_like(value)) if name in case.unused else value for name, value in right.items()
    }
    # Where every step is wrong, unused parameters are not the reason.
    if not case.pattern.every_step:
        yield from case.predicted(SomeParameters(Combination(only({case.rank}, case.world))))
        yield case.clipped(own)


def _stale_where_unused(case: OracleGradientCase) -> Gradients:
    if not case.unused or case.micro_batches > 1 or case.clip_norm is not None:
        return
    parts = [dict(part) for part in case.expected.parts[0]]
    for earlier in case.earlier_expected:
        for rank, part in enumerate(parts[: len(earlier.parts[0])]):
            parts[rank] = {**earlier.parts[0][rank], **part}
    yield mean(parts)


def _exchanged(case: OracleGradientCase) -> Gradients:
    raw, factor = case.expected.raw, case.common_factor
    alike = {name: [other for other in raw.values() if other.shape == value.shape] for name, value in raw.items()}
    yield from case.with_nearer(
        {n: min(few, key=lambda one: distance(case.observed[n], factor * one)) for n, few in alike.items()}
    )


def _rows_in_another_order(case: OracleGradientCase) -> Gradients:
    raw = {name: value for name, value in case.expected.raw.items() if value.dim()}
    yield from case.with_nearer({name: value.flip(0) for name, value in raw.items()})
    for shift in (1, -1):
        yield from case.with_nearer({name: value.roll(shift, 0) for name, value in raw.items()})


register(
    OracleGradientCase,
    GradientHypothesis("unused-somewhere-stepped-nowhere", "unused-params", _thrown_away,
        "missing where some rank did not use a parameter",
        "count a rank without a gradient as zero in the average, and keep the other ranks' part", 960),
    GradientHypothesis("averaged-over-its-users", "unused-params", _averaged_over_users,
        "divided by the number of ranks that used a parameter, not by {world}",
        "count a rank without a gradient as zero in the average", 955),
    GradientHypothesis("unused-and-not-synchronised", "unused-params", _own_where_unused,
        "averaged for some parameters and rank {rank}'s own for others, in a step that does not use them all",
        "set find_unused_parameters=True: a bucket was never reduced", 950),
    GradientHypothesis("stale-where-unused", "unused-params", _stale_where_unused,
        "averaged with the last gradients of ranks that had none in this step",
        "zero gradients that no backward writes, or set them to None", 945),
    GradientHypothesis("parameters-exchanged", "sync", _exchanged,
        "right, but some parameters have the gradient of another parameter of their shape",
        "unpack a flat buffer in the order in which it was packed, on every rank", 322),
    GradientHypothesis("rows-in-another-order", "sync", _rows_in_another_order,
        "right, but with the rows of some parameters in a different order",
        "reassemble a gathered or flattened tensor in the order in which it was split", 321),
)  # fmt: skip


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
        yield case.clipped(scaled(count, case.expected.raw))
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
        yield case.clipped({name: value for name, value in case.expected.raw.items() if name in observed})


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
