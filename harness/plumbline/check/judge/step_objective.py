"""The weight of each loss term of each micro-batch and rank in the gradient of a step.

A term is one number that a loss function adds up or averages, such as the loss of one token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.training import BackwardPass, Facts, RecordedRank, RecordedStep
from plumbline.check.judge.rank_weights import JOINT

EXACT = 4 * 2.0**-11
"""Relative error up to which a weight counts as an exact number: four roundings to float16, in which a loss may be
scaled, divided and added. For weights further away, no division is called missing, and a note reports the weight."""

NEAR = 0.02
"""Relative error up to which a factor counts as 1. Chosen: about five roundings to bfloat16. Factors further away are
reported as the script's own, and no division is called missing."""

ALONG = 0.9
"""Cosine above which a gradient counts as a multiple of another one. Chosen: rounding keeps it near 1, and gradients of
different samples are far below. Below it, no factor is reported, and no division is called missing."""


WRITTEN = "the script's own loss"
"""The name of a mean or a sum that the script computes itself."""


@dataclass(frozen=True)
class Share:
    """The loss of one backward pass: its share of the objective, without the loss scale."""

    function: str
    reduction: str
    terms: float
    weight: float
    is_even: bool
    is_alone: bool


@dataclass(frozen=True)
class StepObjective:
    """The losses of one step, one for each rank and micro-batch.

    ``batches_differ``: each loss comes from its own batch. ``factor``: the number by which the mean over ranks of the
    gradients was multiplied before the step, apart from clipping. It is not 1 if the script divides the gradients
    instead of the loss. ``gap``: the distance between the gradient of the objective and that of the mean over all
    terms, relative to the latter; None if unknown. ``is_only_loss``: one stage of a pipeline computes the only loss,
    and its gradient is a known multiple of what the backward passes computed.
    """

    ranks: tuple[tuple[Share, ...], ...]
    batches_differ: bool
    factor: float
    gap: float | None = None
    is_only_loss: bool = False
    of_mean: float = math.nan

    @property
    def shares(self) -> list[Share]:
        return [share for rank in self.ranks for share in rank]

    @property
    def total(self) -> float:
        """The sum of all weights in the gradient with which the optimizer steps."""
        return self.factor * self.of_losses

    @property
    def of_losses(self) -> float:
        """The sum of all weights in the mean over ranks of the losses."""
        return sum(share.weight for share in self.shares) / len(self.ranks)

    @property
    def terms(self) -> float:
        return sum(share.terms for share in self.shares)

    @property
    def rates(self) -> list[float]:
        """The weight of a single term of each loss that has any terms."""
        return [share.weight / share.terms for share in self.shares if share.terms]

    @property
    def is_certain(self) -> bool:
        """Whether the weights are certainly meant for all ranks: the half in a loss ½ x² may look so on two ranks."""
        is_half = len(self.ranks) == 2 and all(equals(sum(share.weight for share in rank), 0.5) for rank in self.ranks)
        return not is_half or all(share.function != WRITTEN for share in self.shares)

    @property
    def has_means(self) -> bool:
        """Whether weights of 1 belong to means: a sum that the script writes has one, too, if it has a single term."""
        return all(
            any(share.function != WRITTEN or share.reduction != "sum" or share.terms > 1 for share in rank)
            for rank in self.ranks
        )

    @property
    def is_even(self) -> bool:
        """Whether every term of the step counts the same."""
        return all(share.is_even for share in self.shares) and spread(self.rates) <= 1 + EXACT


def step_objectives(ranks: Sequence[RecordedRank], *, written: bool = False) -> Iterator[StepObjective]:
    """Yield the objective of each step that these ranks took together, where each pass has one loss.

    ``written``: also if the script computes that loss itself.
    """
    for steps in steps_together(ranks):
        if made := objective_of(steps, written=written):
            yield made


def objective_of(steps: Sequence[RecordedStep], *, written: bool = False) -> StepObjective | None:
    """Return the objective of one step of all ranks; None if a pass has no known loss, or several."""
    shares = [_shares(step, written=written) for step in steps]
    if not all(shares):
        return None
    made = tuple(tuple(own) for own in shares if own is not None)
    differ = all(have_own_batches(step) for step in steps)
    factor = factor_of(steps)
    is_only_loss = steps[0].noted(JOINT).get("losses") == len(steps) == 1 and not math.isnan(factor)
    return StepObjective(made, differ, factor, _gap(steps, made), is_only_loss, _multiple_of_mean(steps, made))


def objective_of_losses(steps: Sequence[RecordedStep]) -> StepObjective | None:
    """Return the objective of the ranks that compute a loss. Stages of a pipeline may send activations instead."""
    own = [step for step in steps if _shares(step)]
    losses = steps[0].noted(JOINT).get("losses", len(steps))
    return objective_of(own) if len(own) == losses else None


def is_loss_divided(ranks: Sequence[RecordedRank]) -> bool | None:
    """Return whether each rank divides its loss by the number of ranks that compute one, None if unknown.

    If something is added to a loss, its weight alone does not show that the whole is divided.
    """
    objectives = [made for steps in steps_together(ranks) if (made := objective_of_losses(steps))]
    are_alone = all(share.is_alone for one in objectives for share in one.shares)
    for answer in (True, False) if are_alone else (False,):
        weights = [(one.of_losses, 1 / len(one.ranks) if answer else 1.0) for one in objectives]
        if weights and all(abs(own - weight) <= NEAR * weight for own, weight in weights):
            return answer
    return None


def has_plain_mean(steps: Sequence[RecordedStep], factor: float) -> bool:
    """Return whether the loss of a step, however it is written, is a mean or contains one, which makes a factor wrong.

    Every term has to be a mean. If one has the weight 1 on every rank, the loss does not make up for the ``factor`` by
    which gradients are multiplied. Others may have coefficients, but none that may do so: for a sum over ranks, a term
    that is divided by the samples of all ranks has weights that add up to 1. Nor may all terms together, which the
    script may average. It is not certain over what a sum is a mean, unless a mask says what its terms are.
    """
    if (made := objective_of(steps, written=True)) and all(share.function == WRITTEN for share in made.shares):
        return made.has_means and all(equals(sum(share.weight for share in rank), 1.0) for rank in made.ranks)
    every = [_weights_of_means(step) for step in steps]
    if not all(every) or len({len(weights) for weights in every}) != 1:
        return False
    terms = list(zip(*every, strict=True))
    possible = [weight for term in terms for weight in (*term, sum(term) / len(term))] + [sum(own) for own in every]
    makes_up = any(equals(weight, 1 / factor) for weight in possible)
    return not makes_up and any(all(equals(weight, 1.0) for weight in term) for term in terms)


def _weights_of_means(step: RecordedStep) -> list[float]:
    """Return the weight of each term of a step's loss; nothing if any is not certainly a mean."""
    passes = [(one.scale, one.noted("objective").get("means") or ()) for one in step.passes]
    if len({len(means) for _, means in passes}) != 1 or any(len(one) != 1 for _, means in passes for one in means):
        return []
    return [sum(part) for part in zip(*([one / scale for (one,) in means] for scale, means in passes), strict=True)]


def steps_together(ranks: Sequence[RecordedRank]) -> Iterator[list[RecordedStep]]:
    """Yield each step that all of these ranks took, as a list over ranks."""
    for index in range(min((len(rank.steps) for rank in ranks), default=0)):
        steps = [rank.steps[index] for rank in ranks]
        if len({(step.optimizer, step.number) for step in steps}) == 1 and not any(step.skipped for step in steps):
            yield steps


def factor_of(steps: Sequence[RecordedStep]) -> float:
    """Return the factor by which the mean over ranks of the local gradients was multiplied before clipping."""
    factor = multiple_of(steps)
    if abs(factor - 1) > NEAR and steps[0].noted("masters").get("limit"):
        return math.nan  # the trainer clips with its own code
    return factor


def _multiple_of_mean(steps: Sequence[RecordedStep], ranks: Sequence[Sequence[Share]]) -> float:
    """Return which multiple of the gradient of the mean over all terms optimizers received.

    NaN if it is none, or as near to a multiple of the mean over ranks of the local gradients.
    """
    pairs = [
        (share, one.local / one.scale)
        for step, own in zip(steps, ranks, strict=True)
        for one, share in zip(step.passes, own, strict=False)
    ]
    if not all(share.is_alone and share.is_even and share.weight > 0 for share, _ in pairs):
        return math.nan
    if len({*(step.received.shape for step in steps), *(local.shape for _, local in pairs)}) > 1:
        return math.nan  # ranks step different parameters
    received = received_by(steps).nan_to_num()
    if not bool(received.any()):
        return math.nan
    terms = sum(share.terms for share, _ in pairs)
    mean = torch.stack([local * (share.terms / (share.weight * terms)) for share, local in pairs]).sum(0)
    plain = torch.stack([local for _, local in pairs]).sum(0)
    if not bool(mean.any()) or not bool(plain.any()):
        return math.nan
    factors = [float(received @ one) / float(one @ one) for one in (mean, plain)]
    apart = [float((received - by * one).norm()) for by, one in zip(factors, (mean, plain), strict=True)]
    size = float(received.norm())
    return factors[0] if apart[0] <= min(NEAR * size, apart[1] / 4) and apart[1] > EXACT * size else math.nan


def multiple_of(steps: Sequence[RecordedStep]) -> float:
    """Return which multiple of the ranks' mean local gradient optimizers received; NaN if it is not a multiple.

    A factor other than 1 is returned only if it explains all but rounding.
    """
    first = steps[0]
    if any(one.local.shape != first.received.shape for step in steps for one in step.passes):
        return math.nan  # shards of unequal sizes
    local = sum((one.local / one.scale for step in steps for one in step.passes), torch.zeros_like(first.received))
    mean, received = local / len(steps), received_by(steps).nan_to_num()
    product, lengths = float(received @ mean), float(received.norm() * mean.norm())
    # A vector in another direction is not a multiple: it is wrong, or some local gradients are unknown.
    if not lengths or product < ALONG * lengths:
        return math.nan
    factor = product / float(mean @ mean)
    unexplained = float((received - factor * mean).norm())
    return factor if abs(factor - 1) <= NEAR or unexplained <= NEAR * factor * float(mean.norm()) else math.nan


def received_by(steps: Sequence[RecordedStep]) -> Tensor:
    """Return what the first optimizer received before clipping, completed from the others if each has pieces."""
    first, *others = [step.before_clipping for step in steps]
    for other in others if steps[0].is_in_pieces else ():
        first = torch.where(first.isnan(), other, first)
    return first


def have_own_batches(step: RecordedStep) -> bool:
    """Return whether each pass follows one forward of the same module, with its own batch of the same loader."""
    fetched = [_fetched(own) for own in forwards_by_pass(step)]
    if any(one is None for one in fetched):
        return False
    known = [one for one in fetched if one is not None]
    return len({one[:2] for one in known}) == 1 and len(set(known)) == len(known)


def loss_passes(step: RecordedStep) -> list[BackwardPass]:
    """Return the passes that begin at a loss, not at activations whose gradient another pipeline stage computed."""
    joint = step.noted(JOINT)
    has_stages = joint.get("losses", 1) < joint.get("ranks", 1)
    return [one for one in step.passes if not (has_stages and one.facts["is_inner"])]


def forwards_by_pass(step: RecordedStep) -> list[Sequence[Facts]]:
    """Return the forwards before each pass from a loss, or those that it reaches if forwards come before other passes.

    Schedules of pipelines run several forwards before the first pass. Forwards inside of others are left out: they may
    get parts of a batch, or activations.
    """
    before = [one.noted("batches").get("forwards", ()) for one in step.passes]
    if all(before) and len(loss_passes(step)) == len(before):
        return [[made for made in own if not made.get("is_inner")] or own for own in before]
    numbered = {made.get("number"): made for own in before for made in own}
    reached = [one.facts.get("reached", ()) for one in loss_passes(step)]
    return [[numbered[number] for number in own if number in numbered] for own in reached]


def spread(rates: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest."""
    least, most = min(rates, default=1.0), max(rates, default=1.0)
    return most / least if least > 0 else (1.0 if least == most else float("inf"))


def equals(number: float, exact: float) -> bool:
    """Return whether a weight equals an exact number, within ``EXACT``."""
    return abs(number - exact) <= EXACT * abs(exact)


def _gap(steps: Sequence[RecordedStep], ranks: Sequence[Sequence[Share]]) -> float | None:
    """Return the relative distance of the gradient from that of the mean over all terms, None if unknown.

    If a pass differentiates nothing but one loss, its gradient is that of the loss's mean, times the loss's weight.
    """
    if any(len(loss_passes(step)) < len(step.passes) for step in steps):
        return None  # other passes add the gradients of other stages
    pairs = [
        (share, one.local / one.scale)
        for step, shares in zip(steps, ranks, strict=True)
        for one, share in zip(step.passes, shares, strict=True)
        if share.terms or share.weight
    ]
    if len({local.shape for _, local in pairs}) != 1:
        return None
    if not all(share.is_alone and share.is_even and share.terms and share.weight for share, _ in pairs):
        return None
    weights, terms = sum(share.weight for share, _ in pairs), sum(share.terms for share, _ in pairs)
    used = torch.stack([local / weights for _, local in pairs]).sum(0)
    mean = torch.stack([local * (share.terms / (share.weight * terms)) for share, local in pairs]).sum(0)
    gap = float((used - mean).norm() / mean.norm())
    return gap if math.isfinite(gap) else None


def calls_of_one_loss(noted: Facts) -> list[Facts]:
    """Return the loss calls of a pass if they form one loss: a single call, or sums over chunks; otherwise nothing.

    Chunks use the same function, each term has the same weight, and nothing else is added to them.
    """
    calls: list[Facts] = list(noted.get("calls", ()))
    if len(calls) < 2:
        return calls
    if {(call["function"], call["reduction"]) for call in calls} != {(calls[0]["function"], "sum")}:
        return []
    return calls if is_sum_of_calls(noted) and weigh_the_same(calls) else []


def is_sum_of_calls(noted: Facts) -> bool:
    """Return whether the loss of a pass is a sum of results of loss calls, as far as its graph says."""
    terms = noted.get("terms") or ()
    return len(terms) == len(noted.get("calls", ())) and all(term["call"] for term in terms)


def weigh_the_same(calls: Sequence[Facts]) -> bool:
    if any(call["weight"] is None for call in calls):
        return False
    rates = [call["weight"] / call["terms"] for call in calls if call["terms"]]
    return all(call["even"] for call in calls) and spread(rates) <= 1 + EXACT


def _shares(step: RecordedStep, *, written: bool = False) -> list[Share] | None:
    """Return the one loss of each pass that begins at one.

    None if such a pass has no known loss, or several, or other optimizers' passes add to it.
    """
    if step.other_passes:
        return None
    shares = []
    for one in loss_passes(step):
        noted = one.noted("objective")
        if written and (own := _written(noted)):
            kind = noted["terms"][0]["name"]
            reduction = "sum" if kind.startswith("a sum") else kind
            weight = own["weight"] / one.scale
            shares.append(Share(WRITTEN, reduction, own["terms"], weight, own["even"], is_alone=True))
            continue
        calls = calls_of_one_loss(noted)
        if not calls or any(call["weight"] is None for call in calls):
            return None
        first, is_one_call = calls[0], len(calls) == 1
        terms, weight = (sum(call[kind] for call in calls) for kind in ("terms", "weight"))
        is_even = first["even"] if is_one_call else True
        if is_one_call and first["reduction"] == "none":  # the script may leave out terms, as with a mask
            terms, is_even = first["own"]["terms"], first["own"]["even"]
        is_alone = noted["alone"] if is_one_call else True
        shares.append(Share(first["function"], first["reduction"], terms, weight / one.scale, is_even, is_alone))
    return shares


def _written(noted: Facts) -> Facts | None:
    """Return the weights of a loss that the script computes itself, if it is certain what its terms are."""
    terms: Sequence[Facts] = noted.get("terms") or ()
    if noted.get("calls") or len(terms) != 1 or len(terms[0]["levels"]) != 1:
        return None
    (level,) = terms[0]["levels"]
    # A mask may leave no term of a micro-batch.
    is_known = level.get("sure") and not level.get("scaled") and level.get("terms") is not None
    return level if is_known and math.isfinite(level["weight"]) else None


def _fetched(forwards: Sequence[Facts]) -> tuple[Any, ...] | None:
    if not forwards or forwards[0]["fetched"] is None:
        return None
    # A wrapper, such as DeepSpeed's engine, passes the same batch on to the module inside it.
    if len({one["module"] for one in forwards}) < len(forwards) or len({one.get("order") for one in forwards}) > 1:
        return None
    fetched = forwards[0]["fetched"]
    return forwards[0]["module"], fetched["loader"], fetched["pass"], fetched["batch"]
