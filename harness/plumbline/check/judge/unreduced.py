"""Finds parameters whose gradients the model's wrapper does not reduce, such as adapters added later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from plumbline.check.evidence.training import Parameter, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import not_judged
from plumbline.check.judge.precision_used import OBSERVER as PRECISION
from plumbline.check.judge.rank_weights import (
    WEIGHTS,
    RankWeights,
    shared_numbers,
    trains_shards,
    weights_are_made_equal,
    weights_at,
    weights_of,
)
from plumbline.check.rank.joint.copies_and_parts import largest_rounding
from plumbline.core.finding import Finding
from plumbline.evidence.training_record import StepOfRanks
from plumbline.judge.findings import failed_with_hint, with_hint
from plumbline.report.text import listed

CHECK = "gradients"

MADE_EQUAL = (
    "each rank steps with its own gradients, and the script makes the ranks' weights equal between steps, as local SGD "
    "does; it is not known whether it averages them"
)
"""Why unreduced gradients are not judged."""

MADE_EQUAL_LATER = (
    "each rank steps with its own gradients, and the script makes the ranks' weights equal only after the recorded "
    "steps, as local SGD does; record more --steps than it takes until then"
)

AVERAGED = "the script averages the weights of all ranks between steps, as local SGD does"

_CAUSES = ("not-synchronised", "some-parameters-not-synchronised", "exchanged-otherwise")

OUTSIDE = "outside"

_WHY = {
    OUTSIDE: (
        "{names} {are} outside DistributedDataParallel, which wraps only some of the trained modules: wrap one module "
        "that contains all of them, or average these gradients in the script"
    ),
    "added": (
        "{names} {were} added to the model after DistributedDataParallel was created, so it does not reduce their "
        "gradients: add all parameters first, then wrap the model"
    ),
    "frozen": (
        "{names} did not require a gradient when DistributedDataParallel was created, so it does not reduce their "
        "gradients: wrap the model again after unfreezing parameters"
    ),
    "unsharded": (
        "{names} {are} not sharded by FSDP, so it does not reduce their gradients: add parameters before "
        "fully_shard, or broadcast them once and average their gradients in the script"
    ),
}


def with_reason(finding: Finding, names: Iterable[str], training: RecordedTraining) -> Finding:
    """Return a finding about unsynchronised gradients, with a hint that says why the wrapper does not reduce them.

    ``names`` are the parameters with wrong gradients.
    """
    if finding.cause not in _CAUSES:
        return finding
    wrong = set(names)
    weights = list(weights_of(training))
    is_outside = are_outside(wrong, training)
    reasons: dict[str, dict[str, None]] = {}
    for one in weights:
        why = one.why_unreduced or (OUTSIDE if is_outside else "")
        if why and one.parameter.name in wrong:
            size = "×".join(map(str, one.parameter.shape))  # several modules may have the name of their class
            name = f"{one.parameter.name} ({size})" if why == OUTSIDE and size else one.parameter.name
            reasons.setdefault(why, {}).setdefault(name)
    if not reasons:
        return _with_unreached(finding, training)
    why, found = max(reasons.items(), key=lambda each: len(each[1]))
    forms = {"were": "was", "are": "is"} if len(found) == 1 else {"were": "were", "are": "are"}
    return with_hint(finding, _WHY[why].format(names=listed(found), **forms))


def are_outside(names: Iterable[str], training: RecordedTraining) -> bool:
    """Return whether DistributedDataParallel wraps only other parameters than these."""
    wrapped = {one.parameter.name for one in weights_of(training) if one.is_wrapped}
    return bool(wrapped) and wrapped.isdisjoint(names)


def _with_unreached(finding: Finding, training: RecordedTraining) -> Finding:
    """Return the finding; its hint names wrapped parameters without a gradient, for which the wrapper waits."""
    unreached = [
        one.parameter.name
        for steps in training.common_steps
        if steps.number == finding.step
        for one in weights_at(steps)
        if one.is_wrapped and one.parameter.trained and any(bool(each.isnan().all()) for each in one.received)
    ]
    if finding.cause != "not-synchronised" or not unreached:
        return finding
    return with_hint(
        finding,
        f"if the forward goes through the DistributedDataParallel object, this waits for gradients of "
        f"{listed(unreached)}, which the loss does not use: leave them out of the model, or pass "
        f"find_unused_parameters=True; otherwise {finding.hint}",
    )


def judge_replicated_gradients(training: RecordedTraining) -> Finding | None:
    """Return the failure of DTensors with the placement Replicate that have a different gradient on each rank.

    Either the parameter has this placement, or only its gradient, of which each rank then uses a part of its own copy.

    None also if the ranks have the same weights after the step, because it may average gradients itself. Not judged if
    the script makes weights equal before a later step.
    """
    for steps in training.common_steps:
        eps = max(map(_coarsest, steps.values()))
        apart = [
            one
            for one in weights_at(steps)
            if one.is_replicated and one.differ("after") and not one.is_rounding and _have_other_gradients(one, eps)
        ]
        if apart and weights_are_made_equal(training):
            return not_judged(CHECK, MADE_EQUAL, steps.number)
        if apart:
            names = [one.parameter.name for one in apart]
            finding = failed_with_hint(
                CHECK,
                f"{listed(names)} {'is a DTensor' if len(names) == 1 else 'are DTensors'} with the placement "
                "Replicate, but each rank steps with a different gradient",
                "all-reduce it: as a sum if ranks hold parts of one batch, as a mean if each rank has its own batch",
                cause="some-parameters-not-synchronised",
                family="sync",
                step=steps.number,
                rank=min(steps),
                parameter=names[0],
            )
            return with_reason(finding, names, training)
        if names := _copied_apart(steps, eps):
            what = "the gradient of {} is" if len(names) == 1 else "the gradients of {} are"
            return failed_with_hint(
                CHECK,
                f"{what.format(listed(names))} whole on every rank (placement Replicate), but different between "
                "ranks, so each rank updates its shard with another gradient",
                "give ranks that hold parts of one model the same batch, and change gradients in the same way on all "
                "of them: clip by the norm of the whole model, for example",
                cause="some-parameters-not-synchronised",
                family="sync",
                step=steps.number,
                rank=min(steps),
                parameter=names[0],
            )
    return None


def _copied_apart(steps: StepOfRanks[RecordedStep], coarsest: float) -> list[str]:
    """Return the sharded parameters whose gradients every rank has whole, but with other values than other ranks."""
    if any(step.is_in_pieces or WEIGHTS not in step.facts for step in steps.values()):
        return []
    numbers = shared_numbers(steps)
    received = {rank: step.parts(step.received) for rank, step in steps.items()}
    found = []
    for index, number in enumerate(next(iter(numbers.values()))):
        places = {rank: own[index] for rank, own in numbers.items()}
        copied = (steps[rank].facts[WEIGHTS].get("copied") for rank in steps)
        if not all(one is not None and one[place] for one, place in zip(copied, places.values(), strict=True)):
            continue
        parameter = steps.first.parameters[number]
        if _are_apart([received[rank][place] for rank, place in places.items()], parameter, coarsest):
            found.append(parameter.name)
    return found


def separate_adapters(training: RecordedTraining) -> list[str]:
    """Return the parameters that each rank trains separately, next to a frozen model that is sharded over all ranks.

    Empty if shards are trained as well, because the ranks then train one model.
    """
    if any(trains_shards(step) for step in training.steps):
        return []
    return [*dict.fromkeys(one.parameter.name for one in _unsharded(training))]


def ranks_hold_one_model(training: RecordedTraining) -> bool:
    """Return whether unreduced parameters are trained together with shards of one model."""
    return any(_unsharded(training)) and not separate_adapters(training)


def _unsharded(training: RecordedTraining) -> Iterator[RankWeights]:
    return (one for one in weights_of(training) if one.why_unreduced == "unsharded")


def _have_other_gradients(one: RankWeights, coarsest: float) -> bool:
    return one.differ("gradients") and _are_apart(one.received, one.parameter, coarsest)


def _are_apart(received: Sequence[torch.Tensor], parameter: Parameter, coarsest: float) -> bool:
    dtype = getattr(torch, parameter.dtype)
    if not dtype.is_floating_point:
        return False
    first, *others = [each.nan_to_num() for each in received]
    size = max(float(each.norm()) for each in (first, *others))
    most = largest_rounding(max(torch.finfo(dtype).eps, coarsest) / 2) * size
    return any(float((each - first).norm()) > most for each in others)


def _coarsest(step: RecordedStep) -> float:
    """Return the epsilon of the coarsest dtype in which a step's gradients were computed, as far as known."""
    facts = [step.noted(PRECISION), *(one.noted(PRECISION) for one in step.passes)]
    kept = [name for one in facts for kind in ("parameters", "gradients") for name in one.get(kind, ())]
    used = [name.split()[-1] for one in facts for name in one.get("autocast", ())]
    dtypes = [getattr(torch, name, None) for name in (*kept, *used)]
    return max((torch.finfo(one).eps for one in dtypes if one is not None and one.is_floating_point), default=0.0)
