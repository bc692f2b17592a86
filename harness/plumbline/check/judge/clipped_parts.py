"""Checks that a model in parts was clipped by one factor, and by the norm of the whole model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.clipped_masters import master_steps
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.judged_gradients import received_gradients
from plumbline.check.judge.noted import FIRST_SEEN, ObserverFacts, side_by_side
from plumbline.check.judge.rank_weights import (
    LAYOUT,
    RankWeights,
    forward_communicates,
    rank_layout,
    trains_shards,
    weights_are_made_equal,
    weights_at,
)
from plumbline.check.judge.step_objective import NEAR, objective_of, spread
from plumbline.check.rank.observers.parallelism import REPLICATED_SHARDS
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.evidence.training_record import StepOfRanks, step_copies
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import listed


def clipped_shard_by_shard(training: RecordedTraining) -> Finding | None:
    """Find ranks whose clipping calls scaled the shards of one gradient by different factors."""
    for ranks, factors in _factors_of_shards(training):
        if any(each.facts.get("in_flat_parts") for one in ranks.values() for each in one.step.passes):
            continue  # it is unknown which ranks belong together
        if factors and max(factors) - min(factors) > rounding(ranks):
            return clipped_apart(
                ranks.number,
                f"each rank scaled its shards by a different factor ({numbers(factors)})",
                "clip by the norm of all shards together: call model.clip_grad_norm_() under FSDP1, "
                "torch.nn.utils.clip_grad_norm_ with DTensors",
            )
    return None


def clipped_apart(
    step: int, observed: str, hint: str, cause: str = "clipped-shard-by-shard", family: str = "clipping"
) -> Finding:
    """Return the failure of several ranks, with the step at which it was first seen."""
    return failed_with_hint(OBSERVER, f"{observed}{FIRST_SEEN}", hint, cause=cause, family=family, step=step)


def rounding(ranks: StepOfRanks[ObserverFacts]) -> float:
    """Return by how much rounding can change the norms of one gradient, relative to these."""
    return max(float(one.facts["roundings"]) for one in ranks.values())


def numbers(values: Iterable[float]) -> str:
    return listed(f"{one:.6g}" for one in values)


def _factors_of_shards(training: RecordedTraining) -> Iterator[tuple[StepOfRanks[ObserverFacts], list[float]]]:
    """Yield steps before which ranks clipped shards by norm, and the factors; 1 for a rank that did not clip."""
    for ranks, calls in last_calls(training, sharded=True):
        yield ranks, [call["factor"] for call in calls.values() if call["norm"]]
    for ranks in side_by_side(training, OBSERVER):
        last = [own[-1] for one in ranks.values() if (own := complete(one))]
        lacking = [one for one in ranks.values() if not complete(one) and one.facts["of"]]
        everywhere = len(ranks) == training.world_size and step_copies(ranks.values())
        if everywhere and last and lacking and all(one["kind"] == "norm" and one["sharded"] for one in last):
            yield ranks, [1.0, *(one["factor"] for one in last if one["norm"])]


def multiplied_shards(training: RecordedTraining) -> Finding | None:
    """Find ranks whose own code multiplied the shards of one gradient by different factors."""
    if not rank_layout(training).is_sharded:
        return None
    for ranks in side_by_side(training, OBSERVER):
        if not all(trains_shards(one.step) for one in ranks.values()):
            continue  # unsharded gradients, such as those of adapters, may be averaged
        factors = [(one.facts["by_hand"] or {"factor": 1.0})["factor"] for one in ranks.values()]
        if len(ranks) == training.world_size and None not in factors and differ(factors, rounding(ranks)):
            observed = f"the script multiplied each rank's shards by a different factor ({numbers(factors)})"
            but = ", although the shards are parts of one gradient"
            if not _are_one_over_own_counts(list(ranks.values()), factors):
                hint = "compute one factor, from the norm over all shards"
                return clipped_apart(ranks.number, f"{observed}{but}", hint)
            return clipped_apart(
                ranks.number,
                f"{observed}, apparently 1 / the rank's own number of tokens or samples{but}",
                "sum the number of tokens or samples over all ranks with an all-reduce, and divide by the sum",
                "divided-by-own-count",
                "loss-normalisation",
            )
    return None


def _are_one_over_own_counts(ranks: Sequence[ObserverFacts], factors: Sequence[float]) -> bool:
    """Return whether the factors give the losses of each rank the same total weight."""
    objectives = [objective_of([one.step]) for one in ranks]
    weights = [one.of_losses for one in objectives if one is not None]
    if len(weights) < len(ranks):
        return False
    totals = [factor * weight for factor, weight in zip(factors, weights, strict=True)]
    # Factors that hardly differ are no evidence.
    return min(totals) > 0 and spread(totals) - 1 <= min(NEAR, (spread(factors) - 1) / 4)


def clipped_copies_in_parts(training: RecordedTraining) -> Finding | None:
    """Find ranks that clip their parts of the master weights' gradients, each by the norm of its own part."""
    for step in master_steps(received_gradients(training)):
        if step.is_clipped_by_parts:
            return clipped_apart(
                step.cases[0].step.number,
                "each rank clipped its part of the gradients by the norm of that part, so the parts are scaled by "
                f"different factors ({numbers(step.factors.values())})",
                "clip by the norm over the parts of all ranks: sum the squared norms with an all-reduce",
            )
    return None


def clipped_copies_apart(training: RecordedTraining) -> Finding | None:
    """Find ranks that clip copies of one parameter by different factors, each by the norm of what it holds."""
    compared = JointTruth(training).compared
    copies = {tuple(ranks) for _, found in compared for _, ranks in found["judged"] if len(ranks) > 1}
    # Once gradients are wrong, norms differ between ranks in any case.
    first_wrong = min((number for number, found in compared if found["wrong"]), default=math.inf)
    for steps, calls in last_calls(training, sharded=False):
        if steps.number >= first_wrong:
            continue
        for ranks in copies:
            factors = [calls[rank]["factor"] for rank in ranks]
            if differ(factors, NORM_KNOWN_TO):
                return clipped_apart(
                    steps.number,
                    f"ranks {listed(ranks)} hold the same parameters, and scaled their gradients by different factors "
                    f"({numbers(factors)})",
                    "clip by the norm of the whole model: add the squared norms of all parts, and count copies once",
                )
    return None


def multiplied_copies(training: RecordedTraining) -> Finding | None:
    """Find ranks of a model in parts whose own code multiplied the gradients of copies by different factors."""
    if not forward_communicates(training) or weights_are_made_equal(training):
        return None  # each rank may train its own model
    for steps in training.common_steps:
        noted = [step.noted(OBSERVER) for step in steps.values()]
        relative = max(one.get("roundings", 0.0) for one in noted)
        copies = [one for one in weights_at(steps) if not one.differ("before")]
        factors = _factors_of_copies(copies, relative) if any(one.get("by_hand") for one in noted) else None
        entries = sum(one.entries for step in steps.values() for one in step.parameters)
        # One norm that each rank adds up in float32 by itself is off by at most a rounding for each entry.
        if factors is not None and differ(factors, min(NORM_KNOWN_TO, max(relative, entries * 2.0**-24))):
            return clipped_apart(
                steps.number,
                f"ranks {listed(steps)} hold the same {counted(len(copies), 'parameter')}, and the script multiplied "
                f"the gradients of these by different factors ({numbers(factors)} × those of rank {min(steps)})",
                "compute one factor on all ranks: for clipping, add the squared norms of all parts of the model with "
                "an all-reduce, and count copies once",
            )
    return None


def _factors_of_copies(copies: Sequence[RankWeights], relative: float) -> list[float] | None:
    """Return by which factor each rank's gradients of copies are those of the first rank.

    None if they are no multiples, or if fewer than two of them are more than one number. A rank without any gradient of
    them does not compute these layers.
    """
    received = [[each.nan_to_num() for each in one.received] for one in copies if one.parameter.entries > 1]
    used = [own for own in received if bool(own[0].any())]
    if len(used) < 2:
        return None
    vectors = [torch.cat(each) for each in zip(*used, strict=True)]
    first = vectors[0]
    if not all(bool(each.any()) for each in vectors):
        return None
    factors = [float(each @ first / (first @ first)) for each in vectors]
    apart = (float((each - factor * first).norm()) for each, factor in zip(vectors, factors, strict=True))
    limits = (relative * float(each.norm()) for each in vectors)
    return factors if all(one <= limit for one, limit in zip(apart, limits, strict=True)) else None


def clipped_by_another_norm(training: RecordedTraining) -> Finding | None:
    """Find gradients of a model in parts that were clipped by a norm other than that of the whole model."""
    whole = {number: found["norms"] for number, found in JointTruth(training).compared}
    if any(len({step.optimizer for step in rank.steps}) > 1 for rank in training.ranks):
        return None  # each may have a norm of its own
    for ranks in side_by_side(training, OBSERVER):
        calls = {rank: own for rank, one in ranks.items() if (own := complete(one))}
        norms = whole.get(ranks.number) or _norms_of_shards(training, calls)
        covers_all = all(sum(call["covered"] for call in own) == ranks[rank].facts["of"] for rank, own in calls.items())
        everywhere = covers_all and 1 < len(calls) == training.world_size
        if norms and everywhere and all(map(_are_by_one_norm, calls.values())):
            found = _compared_norms(ranks.first, list(calls.values()), norms)
            if found is not None:
                return found
    return None


def _are_by_one_norm(calls: Sequence[Facts]) -> bool:
    """Return whether calls clip to one limit by one norm. Each of several calls may clip one parameter.

    Several calls with norms that are DTensors, whose values are not known, may each compute the norm of their own part.
    """
    first = calls[0]
    is_known = len(calls) == 1 or first["returned"] is not None
    return (
        is_known
        and first["norm_type"] == 2.0
        and all(
            call["kind"] == "norm"
            and 0 < call["limit"] < math.inf
            and (call["limit"], call["norm_type"], call["returned"]) == (first["limit"], 2.0, first["returned"])
            for call in calls
        )
    )


def _norms_of_shards(training: RecordedTraining, calls: Mapping[int, Sequence[Facts]]) -> tuple[float, float] | None:
    """Return the norm of all shards as lower and upper bound; None if their layout on the ranks is unknown."""
    layout = [rank.noted(LAYOUT) for rank in training.ranks]
    kinds = {kind for one in layout for module in one.get("modules", ()) for kind in module["layouts"]}
    shapes = {tuple(mesh["shape"]) for one in layout for mesh in one.get("meshes", ())}
    has_groups = any(one.get("groups") for one in layout)
    if kinds == {REPLICATED_SHARDS} and {len(shape) for shape in shapes} == {2} and len(shapes) == 1:
        ((replicas, _),) = shapes
    elif kinds == {"1: Shard"} and not shapes and not has_groups:
        replicas = 1
    else:
        return None
    if len(calls) < training.world_size or not all(call["sharded"] for own in calls.values() for call in own):
        return None
    norm = math.hypot(*(_held(own) for own in calls.values())) / math.sqrt(replicas)
    return norm, norm


def _held(calls: Sequence[Facts]) -> float:
    return math.hypot(calls[0]["others"], *(call["norm"] for call in calls))


def _compared_norms(one: ObserverFacts, every: Sequence[Sequence[Facts]], norms: Sequence[float]) -> Finding | None:
    """Return the failure if the ranks' calls did not clip by a norm between these two."""
    least, most = norms
    calls = [max(own, key=lambda call: call["norm"]) for own in every]
    used = [call["limit"] / call["factor"] - TO_AVOID_ZERO if is_effective(call, one.facts) else None for call in calls]
    if all(
        least <= call["limit"] * (1 + NORM_KNOWN_TO)
        if norm is None
        else least * (1 - NORM_KNOWN_TO) <= norm <= most * (1 + NORM_KNOWN_TO)
        for call, norm in zip(calls, used, strict=True)
    ):
        return None
    held = [_held(own) for own in every]
    whole = f"the norm of the whole model is {most:.6g}"
    if all(
        own <= call["limit"] * (1 + NORM_KNOWN_TO) if norm is None else _near(norm, own)
        for call, norm, own in zip(calls, used, held, strict=True)
    ):
        return one.failed(
            "clipping",
            f"each rank clipped by the norm of the parameters that it holds ({numbers(held)}), but {whole}",
            "add the squared norms of all parts with an all-reduce, and count copies once",
            cause="clipped-shard-by-shard",
            family="clipping",
        )
    if all(norm is not None and _near(norm, math.hypot(*held)) for norm in used):
        return one.failed(
            "clipping",
            f"gradients were clipped by a norm of {math.hypot(*held):.6g}, which counts replicated gradients once "
            f"per copy; {whole}",
            "count each copy once: add the squared norms of different parts only",
            cause="counted-again-in-the-norm",
            family="clipping",
        )
    return one.failed(
        "clipping",
        f"gradients were clipped by the norms {listed(f'{norm:.6g}' if norm else '(no clipping)' for norm in used)}, "
        f"but {whole}",
        "clip by the norm over all ranks: add the squared norms of all parts, and count copies once",
        cause="clipped-to-another-length",
        family="clipping",
    )


def _near(norm: float, other: float) -> bool:
    return abs(norm - other) <= NORM_KNOWN_TO * other


OBSERVER = "clipping"

NORM_KNOWN_TO = 0.01
"""Relative error of a norm that the script computed.

Chosen: sums in float32 over millions of entries are rarely worse, but how a script adds up is not recorded. Clipping by
a norm that is off by less goes unnoticed.
"""

TO_AVOID_ZERO = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


def complete(one: ObserverFacts) -> list[Facts]:
    """Return the calls between the last backward pass of a step and the step."""
    last = last_pass(one)
    return [call for call in one.facts["calls"] if not call["late"] and (last is None or call["pass"] >= last)]


def last_pass(one: ObserverFacts) -> int | None:
    """Return the number of the last backward pass of a step, None without any."""
    return max((each.number for each in one.step.passes), default=None)


def is_effective(call: Facts, facts: Facts) -> bool:
    return bool(call["factor"] < 1 - facts["roundings"])


def last_calls(
    training: RecordedTraining, *, sharded: bool, kinds: Collection[str] = ("norm",), on_all_ranks: bool = True
) -> Iterator[tuple[StepOfRanks[ObserverFacts], dict[int, Facts]]]:
    """Yield steps that every rank took with the same model, and the last clipping call of each rank before them.

    ``on_all_ranks``: only steps before which every rank clipped are included. ``sharded``: all these ranks clipped
    sharded gradients; otherwise all clipped whole ones.
    """
    for ranks in side_by_side(training, OBSERVER):
        calls = {rank: own[-1] for rank, one in ranks.items() if (own := complete(one))}
        clip = len(calls) == len(ranks) if on_all_ranks else bool(calls)
        is_copied = clip and 1 < len(ranks) == training.world_size and step_copies(ranks.values())
        in_parts = any(not each.is_held for one in ranks.values() for each in one.step.parameters)
        if is_copied and all(
            call["kind"] in kinds and (call["sharded"] or in_parts) == sharded for call in calls.values()
        ):
            yield ranks, calls


def differ(norms: Sequence[float | None], by: float) -> bool:
    """Return whether all norms are known and differ by more than ``by``, relative to the largest."""
    known = [norm for norm in norms if norm is not None]
    return len(known) == len(norms) and max(known) - min(known) > by * max(known)


def are_equal(gradients: Sequence[Tensor | None], within: float) -> bool:
    """Return whether all gradients are known and equal the first one ``within`` a part of its norm."""
    vectors = [vector.nan_to_num() for vector in gradients if vector is not None]
    if len(vectors) < len(gradients):
        return False
    most = within * float(vectors[0].norm())
    return all(float(torch.linalg.vector_norm(vector - vectors[0])) <= most for vector in vectors)
