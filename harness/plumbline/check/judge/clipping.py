"""Were gradients clipped once, when they were complete, averaged and unscaled, and by the norm of all of them?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.clipped_masters import master_steps
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.judged_gradients import received_gradients
from plumbline.check.judge.noted import (
    FIRST_SEEN,
    ObserverFacts,
    failed_observers,
    information,
    not_judged,
    noted,
    side_by_side,
)
from plumbline.check.judge.rank_layout import OBSERVER as LAYOUT
from plumbline.check.judge.rank_layout import rank_layout
from plumbline.check.judge.rank_weights import trains_shards
from plumbline.check.judge.step_objective import NEAR, objective_of, spread
from plumbline.core.finding import Finding
from plumbline.evidence.recording import step_copies
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import counted, listed

OBSERVER = "clipping"

REPLICATED_SHARDS = "2: Replicate Shard"
"""The layout of shards that several groups of ranks hold."""

NORM_KNOWN_TO = 0.01
"""How well a norm is known that the script has computed, as a part of it.

Chosen: sums in float32 over millions of entries are rarely worse, but how a script adds up is not recorded. Clipping by
a norm that is off by less goes unnoticed.
"""

_TO_AVOID_ZERO = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


def judge_clipping(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong with the calls of clipping, or what they did; nothing where nobody clips."""
    flaws = [
        _before_unscaling,
        _after_the_step,
        _every_micro_batch,
        _before_averaging,
        _to_other_limits,
        _shard_by_shard,
        _copies_in_parts,
    ]
    found = [finding for flaw in flaws if (finding := flaw(training)) is not None]
    each_may_follow = [_shards_by_hand, _copies_apart, _by_another_norm, _other_length]  # from those before it
    for flaw in each_may_follow:
        if not found and (finding := flaw(training)) is not None:
            found = [finding]
    yield from found
    yield from failed_observers(training, OBSERVER, "clipping")
    clipped = [one for one in noted(training, OBSERVER) if _complete(one)]
    if clipped and not found:
        yield from _done(training, clipped)
    yield from _in_part(clipped)
    if not found:
        yield from _by_hand(training)


def _complete(one: ObserverFacts) -> list[Facts]:
    """Return the calls between the last backward pass of a step and the step."""
    last = _last_pass(one)
    return [call for call in one.facts["calls"] if not call["late"] and (last is None or call["pass"] >= last)]


def _last_pass(one: ObserverFacts) -> int | None:
    return max((each.number for each in one.step.passes), default=None)


def _is_effective(call: Facts, facts: Facts) -> bool:
    return bool(call["factor"] < 1 - facts["roundings"])


def _before_unscaling(training: RecordedTraining) -> Finding | None:
    """Find gradients that were clipped with the loss scale still in them.

    A limit that is multiplied by the scale as well is right; such limits are far larger than those without.
    """
    for one in noted(training, OBSERVER):
        for call in one.facts["calls"]:
            scaled = call["scale"] >= 1024 and call["limit"] < math.sqrt(call["scale"])
            if scaled and not call["late"] and _is_effective(call, one.facts):
                return one.failed(
                    "clipping",
                    f"gradients were clipped to {call['limit']:g} while they were still multiplied by the loss scale "
                    f"of {call['scale']:,g}",
                    "call scaler.unscale_(optimizer) before clipping",
                    cause="clipped-before-unscaling",
                    family="clipping",
                )
    return None


def _after_the_step(training: RecordedTraining) -> Finding | None:
    histories: dict[tuple[int, int], list[ObserverFacts]] = {}
    for one in noted(training, OBSERVER):
        histories.setdefault((one.rank, one.step.optimizer), []).append(one)
    for steps in histories.values():
        calls = [(one, call) for one in steps for call in one.facts["calls"]]
        late = [(one, call) for one, call in calls if call["late"] and _is_effective(call, one.facts)]
        if late and all(call["late"] for _, call in calls):
            one, call = late[0]
            return one.failed(
                "clipping",
                f"gradients are clipped to {call['limit']:g} only after the optimizer's step has used them",
                "clip between the last backward pass and the step",
                cause="not-clipped",
                family="clipping",
            )
    return None


def _every_micro_batch(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        last = _last_pass(one)
        for call in one.facts["calls"]:
            early = last is not None and call["pass"] < last and not call["inside"]
            if early and call["kept"] and not call["late"] and _is_effective(call, one.facts):
                return one.failed(
                    "clipping",
                    f"gradients were clipped to {call['limit']:g} before the last backward pass of their step",
                    "clip once, after the last backward pass",
                    cause="clipped-every-micro-batch",
                    family="clipping",
                )
    return None


def _before_averaging(training: RecordedTraining) -> Finding | None:
    for ranks, calls in _last_calls(training, sharded=False):
        rounding = max(one.facts["roundings"] for one in ranks.values())
        if not any(_is_effective(call, ranks[rank].facts) for rank, call in calls.items()):
            continue
        known_to = max(NORM_KNOWN_TO, rounding)
        held = [math.hypot(call["norm"], call["others"]) for call in calls.values()]
        used = [call["returned"] for call in calls.values()]
        norms: list[float] = []
        if _differ(held, rounding) and _are_equal([one.step.received for one in ranks.values()], rounding):
            norms = held
        elif _differ(used, known_to) and _are_equal([one.step.unclipped for one in ranks.values()], rounding):
            norms = used  # which was computed before, of other gradients
        if norms:
            first = next(iter(ranks.values()))
            return failed_with_hint(
                "clipping",
                f"each rank clipped by its own norm ({listed(f'{norm:.6g}' for norm in norms)}), although all ranks "
                f"step with the same gradient{FIRST_SEEN}",
                "clip after the all-reduce",
                cause="clipped-before-averaging",
                family="clipping",
                step=first.step.number,
            )
    return None


def _to_other_limits(training: RecordedTraining) -> Finding | None:
    """Find ranks that hold one gradient, which a wrapper averaged, and clip it to different limits: they part."""
    if not rank_layout(training).is_data_parallel:
        return None  # each rank may train a model of its own
    for ranks, calls in _last_calls(training, sharded=False):
        rounding = max(one.facts["roundings"] for one in ranks.values())
        limits = [call["limit"] for call in calls.values()]
        factors = [call["factor"] for call in calls.values()]
        if len(set(limits)) > 1 and _differ(factors, max(NORM_KNOWN_TO, rounding)):
            if not _are_equal([one.step.unclipped for one in ranks.values()], rounding):
                continue
            return failed_with_hint(
                "clipping",
                f"ranks clip the same gradient to different limits ({listed(f'{one:g}' for one in limits)})"
                f"{FIRST_SEEN}",
                "clip to the same limit on all ranks",
                cause="clipped-to-another-length",
                family="clipping",
                step=next(iter(ranks.values())).step.number,
            )
    return None


def _shard_by_shard(training: RecordedTraining) -> Finding | None:
    for ranks, factors in _factors_of_shards(training):
        if any(each.facts.get("in_flat_parts") for one in ranks.values() for each in one.step.passes):
            continue  # ranks that belong together are not known
        rounding = max(one.facts["roundings"] for one in ranks.values())
        if factors and max(factors) - min(factors) > rounding:
            first = next(iter(ranks.values()))
            return failed_with_hint(
                "clipping",
                f"each rank scaled its shards by a different factor ({listed(f'{one:.6g}' for one in factors)})"
                f"{FIRST_SEEN}",
                "clip by the norm of all shards together: call model.clip_grad_norm_() under FSDP1, "
                "torch.nn.utils.clip_grad_norm_ with DTensors",
                cause="clipped-shard-by-shard",
                family="clipping",
                step=first.step.number,
            )
    return None


def _factors_of_shards(training: RecordedTraining) -> Iterator[tuple[Mapping[int, ObserverFacts], list[float]]]:
    """Yield steps before which ranks clipped shards by a norm, and by what: 1 on a rank that did not call."""
    for ranks, calls in _last_calls(training, sharded=True):
        yield ranks, [call["factor"] for call in calls.values() if call["norm"]]
    for ranks in side_by_side(training, OBSERVER):
        last = [own[-1] for one in ranks.values() if (own := _complete(one))]
        lacking = [one for one in ranks.values() if not _complete(one) and one.facts["of"]]
        everywhere = len(ranks) == training.world_size and step_copies(ranks.values())
        if everywhere and last and lacking and all(one["kind"] == "norm" and one["sharded"] for one in last):
            yield ranks, [1.0, *(one["factor"] for one in last if one["norm"])]


def _shards_by_hand(training: RecordedTraining) -> Finding | None:
    if not rank_layout(training).is_sharded:
        return None
    for ranks in side_by_side(training, OBSERVER):
        if not all(trains_shards(one.step) for one in ranks.values()):
            continue  # whole gradients beside a sharded model, such as those of adapters, may be averaged
        factors = [(one.facts["by_hand"] or {"factor": 1.0})["factor"] for one in ranks.values()]
        rounding = max(one.facts["roundings"] for one in ranks.values())
        if len(ranks) == training.world_size and None not in factors and _differ(factors, rounding):
            if _are_one_over_own_counts(list(ranks.values()), factors):
                return failed_with_hint(
                    "clipping",
                    "each rank multiplied its shards by a number that is inversely proportional to the weight of its "
                    f"own losses ({listed(f'{one:.6g}' for one in factors)}), although the shards are parts of one "
                    f"gradient{FIRST_SEEN}",
                    "sum the number of tokens or samples over all ranks with an all-reduce, and divide by the sum",
                    cause="divided-by-own-count",
                    family="loss-normalisation",
                    step=next(iter(ranks.values())).step.number,
                )
            return failed_with_hint(
                "clipping",
                "the script multiplied each rank's shards by a different factor "
                f"({listed(f'{one:.6g}' for one in factors)}), although the shards are parts of one "
                f"gradient{FIRST_SEEN}",
                "compute one factor, from the norm over all shards",
                cause="clipped-shard-by-shard",
                family="clipping",
                step=next(iter(ranks.values())).step.number,
            )
    return None


def _are_one_over_own_counts(ranks: Sequence[ObserverFacts], factors: Sequence[float]) -> bool:
    """Return whether the factor of each rank makes the losses of that rank have the same total weight."""
    objectives = [objective_of([one.step]) for one in ranks]
    weights = [one.of_losses for one in objectives if one is not None]
    if len(weights) < len(ranks):
        return False
    totals = [factor * weight for factor, weight in zip(factors, weights, strict=True)]
    return min(totals) > 0 and spread(totals) <= 1 + NEAR


def _copies_in_parts(training: RecordedTraining) -> Finding | None:
    """Find ranks that clip their parts of the master weights' gradients, each by the norm of its own part."""
    for step in master_steps(received_gradients(training)):
        if step.is_clipped_by_parts:
            first = step.cases[0]
            return failed_with_hint(
                "clipping",
                "each rank clipped its part of the gradients by the norm of that part, so the parts are scaled by "
                f"different factors ({listed(f'{one:.6g}' for one in step.factors.values())}){FIRST_SEEN}",
                "clip by the norm over the parts of all ranks: sum the squared norms with an all-reduce",
                cause="clipped-shard-by-shard",
                family="clipping",
                step=first.step.number,
            )
    return None


def _copies_apart(training: RecordedTraining) -> Finding | None:
    """Find ranks that clip copies of one parameter by different factors: each by the norm of what it holds."""
    judged = [ranks for _, found in JointTruth(training).compared for _, ranks in found["judged"]]
    copies = {tuple(ranks) for ranks in judged if len(ranks) > 1}
    for steps, calls in _last_calls(training, sharded=False):
        for ranks in copies:
            factors = [calls[rank]["factor"] for rank in ranks]
            if _differ(factors, NORM_KNOWN_TO):
                return failed_with_hint(
                    "clipping",
                    f"ranks {listed(ranks)} hold the same parameters, and scaled their gradients by different factors "
                    f"({listed(f'{one:.6g}' for one in factors)}){FIRST_SEEN}",
                    "clip by the norm of the whole model: add the squared norms of all parts, and count copies once",
                    cause="clipped-shard-by-shard",
                    family="clipping",
                    step=next(iter(steps.values())).step.number,
                )
    return None


def _by_another_norm(training: RecordedTraining) -> Finding | None:
    """Find gradients of a model in parts that were clipped by another norm than that of the whole model."""
    whole = {number: found["norms"] for number, found in JointTruth(training).compared}
    if any(len({step.optimizer for step in rank.steps}) > 1 for rank in training.ranks):
        return None  # each may have a norm of its own
    for ranks in side_by_side(training, OBSERVER):
        first = next(iter(ranks.values()))
        calls = {rank: own for rank, one in ranks.items() if (own := _complete(one))}
        norms = whole.get(first.step.number) or _norms_of_shards(training, calls)
        covers_all = all(sum(call["covered"] for call in own) == ranks[rank].facts["of"] for rank, own in calls.items())
        everywhere = covers_all and 1 < len(calls) == training.world_size
        if norms and everywhere and all(map(_are_by_one_norm, calls.values())):
            found = _compared_norms(first, list(calls.values()), norms)
            if found is not None:
                return found
    return None


def _are_by_one_norm(calls: Sequence[Facts]) -> bool:
    """Return whether calls clip to one limit by one norm: several of them may clip a parameter each."""
    first = calls[0]
    return first["norm_type"] == 2.0 and all(
        call["kind"] == "norm"
        and 0 < call["limit"] < math.inf
        and (call["limit"], call["norm_type"], call["returned"]) == (first["limit"], 2.0, first["returned"])
        for call in calls
    )


def _norms_of_shards(training: RecordedTraining, calls: Mapping[int, Sequence[Facts]]) -> tuple[float, float] | None:
    """Return the norm of all shards together, twice; None where it is not known how they lie on the ranks."""
    layout = [rank.facts.get(LAYOUT) or {} for rank in training.ranks]
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
    """Return what is wrong if the calls of a rank do not use a norm between these two."""
    least, most = norms
    calls = [max(own, key=lambda call: call["norm"]) for own in every]
    used = [
        call["limit"] / call["factor"] - _TO_AVOID_ZERO if _is_effective(call, one.facts) else None for call in calls
    ]
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
            f"each rank clipped by the norm of the parameters that it holds ({listed(f'{own:.6g}' for own in held)}), "
            f"but {whole}",
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


def _other_length(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        for call in one.facts["calls"]:
            norm = math.hypot(call["norm"], call["others"])
            if call["kind"] != "norm" or call["norm_type"] != 2.0 or call["sharded"] or call["given"]:
                continue
            if not norm or norm == math.inf:
                continue
            due = min(1.0, call["limit"] / (norm + _TO_AVOID_ZERO))
            if abs(call["factor"] - due) > max(NORM_KNOWN_TO, one.facts["roundings"]) * due:
                return one.failed(
                    "clipping",
                    f"clipping to {call['limit']:g} multiplied gradients of norm {norm:.6g} by {call['factor']:.6g} "
                    f"instead of {due:.6g}",
                    "call torch.nn.utils.clip_grad_norm_, or give clip_grads_with_norm_ the norm of all gradients",
                    cause="clipped-to-another-length",
                    family="clipping",
                )
    return None


def _last_calls(
    training: RecordedTraining, *, sharded: bool
) -> Iterator[tuple[Mapping[int, ObserverFacts], dict[int, Facts]]]:
    """Yield steps that every rank took with the same model, and the last call of each rank before them.

    Only steps before which every rank clipped by a norm, all of them ``sharded`` gradients, or all of them whole ones.
    """
    for ranks in side_by_side(training, OBSERVER):
        calls = {rank: own[-1] for rank, one in ranks.items() if (own := _complete(one))}
        everywhere = 1 < len(calls) == training.world_size and step_copies(ranks.values())
        in_parts = any(not each.is_held for one in ranks.values() for each in one.step.parameters)
        if everywhere and all(
            call["kind"] == "norm" and (call["sharded"] or in_parts) == sharded for call in calls.values()
        ):
            yield ranks, calls


def _differ(norms: Sequence[float | None], by: float) -> bool:
    """Return whether norms, all of which are known, differ by more than a part of the largest."""
    known = [norm for norm in norms if norm is not None]
    return len(known) == len(norms) and max(known) - min(known) > by * max(known)


def _are_equal(gradients: Sequence[Tensor | None], rounding: float) -> bool:
    vectors = [vector.nan_to_num() for vector in gradients if vector is not None]
    if len(vectors) < len(gradients):
        return False
    most = rounding * float(vectors[0].norm())
    return all(float(torch.linalg.vector_norm(vector - vectors[0])) <= most for vector in vectors)


def _done(training: RecordedTraining, clipped: list[ObserverFacts]) -> Iterator[Finding]:
    """Yield what the calls did; where none of them changed a gradient, whether they are right is not known.

    A call without a limit only measures the norm.
    """
    every = [(call, one.facts) for one in clipped for call in _complete(one)]
    calls = [(call, facts) for call, facts in every if call["limit"] < math.inf]
    if not calls:
        return
    limits = listed(dict.fromkeys(f"{call['kind']} {call['limit']:g}" for call, _ in calls))
    shorter = sum(_is_effective(call, facts) for call, facts in calls)
    made = counted(len(calls), "call") + (" of all ranks" if training.world_size > 1 else "")
    if shorter:
        yield passed(
            "clipping",
            f"gradients were clipped to {limits} between the last backward pass and the step; {shorter} of {made} "
            "scaled them down",
        )
    else:
        yield not_judged("clipping", f"no gradient exceeded the limit ({limits}), so clipping had no effect ({made})")


def _in_part(clipped: list[ObserverFacts]) -> Iterator[Finding]:
    for one in clipped:
        calls = _complete(one)
        covered = max(call["covered"] for call in calls)
        if covered < one.facts["of"]:
            yield information(
                "clipping",
                f"a call clipped only {covered} of the {one.facts['of']} gradients of an optimizer{FIRST_SEEN} at "
                f"{one.name}",
            )
            return


def _by_hand(training: RecordedTraining) -> Iterator[Finding]:
    for one in noted(training, OBSERVER):
        factor = (one.facts["by_hand"] or {}).get("factor")
        is_copied = any(each.held_in is not None for each in one.step.parameters)
        if factor is not None and not is_copied:
            yield information(
                "clipping",
                f"the script itself multiplied all gradients by {factor:.6g} between the last backward pass and the "
                f"step{FIRST_SEEN} at {one.name} on rank {one.rank}",
            )
            return
