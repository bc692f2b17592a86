"""How ranks divide the work: the weights that they have in common, and those that are one rank's part of a model.

Weights are compared by their digests, and by how far they are apart. Parts are experts, for example, and hand-written
tensor-parallel shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from plumbline.check.evidence.training import Facts, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import OBSERVER as MASTERS
from plumbline.core.numbers import counted
from plumbline.evidence.training_record import StepOfRanks

WEIGHTS, JOINT = "weights", "joint"

ULPS = 8
"""Units in the last place by which weights that are rounded differently can differ at most. The distance of projections
is known to a factor of two."""

LOCAL_SGD = "post_localSGD_hook"
"""The communication hook of torch that averages gradients only in the first iterations."""


@dataclass(frozen=True)
class RankWeights:
    """One parameter at one step on all ranks, with what each rank noted about it, in the order of ranks."""

    optimizer: int
    parameter: Parameter
    noted: tuple[Mapping[str, Any], ...]
    received: tuple[torch.Tensor, ...]
    local: tuple[torch.Tensor, ...]

    @property
    def key(self) -> tuple[int, str]:
        """The number of the optimizer, and the parameter's name."""
        return self.optimizer, self.parameter.name

    @property
    def is_wrapped(self) -> bool:
        """Whether a DistributedDataParallel keeps it the same on every rank."""
        return all(one["wrapped"] for one in self.noted)

    @property
    def is_replicated(self) -> bool:
        """Whether it is a DTensor that should be the same on every rank."""
        return all(one.get("replicated") for one in self.noted)

    @property
    def why_unreduced(self) -> str:
        """Why the model's wrapper does not reduce its gradients, "" if it does or there is no wrapper."""
        return next((str(one["unreduced"]) for one in self.noted if one.get("unreduced")), "")

    def differ(self, when: str) -> bool:
        """Return whether ranks differ in a kind of value.

        ``when``: the values they ``began`` with, ``before`` or ``after`` the step, or ``gradients``.
        """
        return len({one[when] for one in self.noted}) > 1

    @property
    def share_gradient(self) -> bool:
        """Whether all ranks step with the same gradient, bit for bit, that is not zero."""
        known = self.noted[0]["gradients"] is not None
        return known and not self.differ("gradients") and all(bool(one.nan_to_num().any()) for one in self.received)

    @property
    def share_reduced_gradient(self) -> bool:
        """Whether all ranks step with the same gradient although their backward passes computed different ones."""
        return self.share_gradient and any(not torch.equal(one, self.local[0]) for one in self.local)

    @property
    def distance(self) -> float:
        """The largest distance from the first rank's weights after the step, relative to their norm."""
        first, *others = [one["projections"] for one in self.noted]
        if first is None or any(other is None for other in others):
            return float("inf")
        reference = torch.tensor(first, dtype=torch.float64)
        most = max(float((torch.tensor(other, dtype=torch.float64) - reference).norm()) for other in others)
        norm = float(reference.norm())
        return most / norm if norm else (float("inf") if most else 0.0)

    @property
    def is_rounding(self) -> bool:
        """Whether different rounding explains how far the ranks' weights are apart."""
        dtype = getattr(torch, self.parameter.dtype)
        return dtype.is_floating_point and self.distance <= ULPS * torch.finfo(dtype).eps


def weights_of(training: RecordedTraining) -> Iterator[RankWeights]:
    """Yield each parameter that every rank's optimizer has as a whole, at each step that all ranks recorded."""
    for steps in training.common_steps:
        yield from weights_at(steps)


def weights_at(steps: StepOfRanks[RecordedStep]) -> Iterator[RankWeights]:
    """Yield each parameter that every rank's optimizer has as a whole; none if the ranks took different steps."""
    if not steps.is_one or any(WEIGHTS not in step.facts for step in steps.values()):
        return
    numbers = shared_numbers(steps)
    received = {rank: step.parts(step.received) for rank, step in steps.items()}
    local = {rank: step.parts(_local(step)) for rank, step in steps.items()}
    for index, number in enumerate(next(iter(numbers.values()))):
        places = {rank: own[index] for rank, own in numbers.items()}
        found = ((rank, _place_in_optimizer(step, places[rank])) for rank, step in steps.items())
        held = {rank: place for rank, place in found if place is not None}
        if len(held) < len(steps) or not _hold_the_same(steps, held):
            continue
        here = tuple(
            {name: values[held[rank]] for name, values in step.facts[WEIGHTS].items()} for rank, step in steps.items()
        )
        if all(one["before"] is not None and one["after"] is not None for one in here):
            yield RankWeights(
                steps.optimizer,
                steps.first.parameters[number],
                here,
                tuple(received[rank][place] for rank, place in places.items()),
                tuple(local[rank][place] for rank, place in places.items()),
            )


def _place_in_optimizer(step: RecordedStep, number: int) -> int | None:
    """Return the number of the optimizer's parameter that holds a parameter, None if this rank's holds none."""
    held = step.parameters[number].held_in
    return number if held is None else held if held >= 0 else None


def _hold_the_same(steps: Mapping[int, RecordedStep], held: Mapping[int, int]) -> bool:
    """Return whether the optimizer's parameter that holds a parameter has the same pieces on all ranks."""
    first, *others = (step.pieces.get(held[rank], ()) for rank, step in steps.items())
    return all(other == first for other in others)


def _local(step: RecordedStep) -> torch.Tensor:
    parts = [one.local / one.scale for one in (*step.other_passes, *step.passes)]
    return sum(parts, torch.zeros_like(step.received))


@lru_cache(maxsize=1)
def reduced_parameters(training: RecordedTraining) -> Set[tuple[int, str]]:
    """Return the optimizer and the name of each parameter whose gradient was reduced over all ranks in some step."""
    return {one.key for one in weights_of(training) if one.share_reduced_gradient}


def all_gradients_are_reduced(training: RecordedTraining) -> bool:
    """Return whether all ranks always step with the same gradients, and some of these were reduced over ranks."""
    every = list(weights_of(training))
    return any(one.share_reduced_gradient for one in every) and not any(one.differ("gradients") for one in every)


def weights_are_made_equal(training: RecordedTraining) -> bool:
    """Return whether ranks with different weights after a step have the same weights before a later one.

    This may also happen after the recorded steps. Torch's communication hook for local SGD counts as well.
    """
    return any(LOCAL_SGD in rank.noted("precision").get("hooks", ()) for rank in training.ranks) or bool(
        when_made_equal(training)
    )


def when_made_equal(training: RecordedTraining) -> str:
    """Return whether the weights of ranks are made equal between ``recorded`` steps or ``later``; "" if they are not.

    Of later steps, only one parameter is known.
    """
    apart: set[tuple[int, str]] = set()
    for steps in training.common_steps:
        weights = {one.key: one for one in weights_at(steps)}
        if apart & weights.keys() and not any(one.differ("before") for one in weights.values()):
            return "recorded"
        apart |= {name for name, one in weights.items() if one.differ("after")}
    noted = [rank.noted(WEIGHTS) for rank in training.ranks]
    first, *others = [one.get("later") or {} for one in noted]
    are_equal = any(own and all(one.get(step) == own for one in others) for step, own in first.items())
    steps_of_one = [step for step in training.ranks[0].steps if first and step.parameters[noted[0]["place"] :]]
    held = {(step.optimizer, step.parameters[noted[0]["place"]].name) for step in steps_of_one}
    is_whole = 1 < len(noted) == training.world_size
    return "later" if are_equal and is_whole and not held.isdisjoint(apart) else ""


def factor_of_equal_weights(training: RecordedTraining) -> float | None:
    """Return the number by which the script multiplies the ranks' mean weights to make them equal between steps.

    It is 1 for an average, and the number of ranks for a sum. None if it is another or no known one.
    """
    factors: set[float | None] = set()
    apart: dict[tuple[int, str], RankWeights] = {}
    for one in weights_of(training):
        before = apart.pop(one.key, None)
        if before is not None and not one.differ("before"):
            factors |= _factors_of_mean(before, one)
        if one.differ("after"):
            apart[one.key] = one
    return factors.pop() if len(factors) == 1 else None


def _factors_of_mean(apart: RankWeights, equal: RankWeights) -> set[float | None]:
    """Return the factor of one parameter; nothing if rounding hides whether it is the mean or one rank's weights."""
    after = [one["projections"] for one in apart.noted]
    before, dtype = equal.noted[0].get("projected_before"), getattr(torch, equal.parameter.dtype)
    if before is None or None in after or not dtype.is_floating_point:
        return {None}
    made, each = torch.tensor(before, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)
    rounding = ULPS * torch.finfo(dtype).eps * float(each.norm(dim=1).mean())
    if float((each - made).norm(dim=1).min()) <= rounding:
        return set()
    possible = (1.0, float(len(each)))
    found = {one for one in possible if float((made - one * each.mean(0)).norm()) <= one * rounding}
    return {*found} or {None}


def ranks_begin_apart(training: RecordedTraining) -> bool:
    """Return whether ranks begin to train with different weights, and no wrapper keeps these the same."""
    first = next(training.common_steps, None)
    return first is not None and any(one.differ("began") and not one.is_wrapped for one in weights_at(first))


def trains_shards(step: RecordedStep) -> bool:
    """Return whether an optimizer trains parameters of which no rank has all values."""
    before = step.noted(WEIGHTS).get("before", ())
    return any(digest is None and one.trained for one, digest in zip(step.parameters, before, strict=False))


def of_all(compared: int, every: int) -> str:
    """Return how many parameters were compared, and where some were not, of how many: ``1 of 4 parameters``."""
    return counted(compared, "parameter") if compared == every else f"{compared} of {counted(every, 'parameter')}"


def shared_numbers(steps: Mapping[int, RecordedStep]) -> Mapping[int, Sequence[int]]:
    """Return, for each rank, the numbers of the parameters that every rank's optimizer has, in one order.

    A parameter is identified by its name in a module and its shape. One that no module holds is identified only if all
    ranks have the same list.
    """
    keys = {tuple((one.name, one.shape) for one in step.parameters) for step in steps.values()}
    if len(keys) == 1:
        return dict.fromkeys(steps, range(len(next(iter(keys)))))
    places = {
        rank: {(one.name, one.shape): number for number, one in enumerate(step.parameters) if one.named}
        for rank, step in steps.items()
    }
    first, *others = places.values()
    common = [key for key in first if all(key in other for other in others)]
    return {rank: [own[key] for key in common] for rank, own in places.items()}


def shared_part(steps: Mapping[int, RecordedStep]) -> StepOfRanks[RecordedStep]:
    """Return the same step of several ranks, restricted to the parameters that every rank's optimizer has."""
    numbers = shared_numbers(steps)
    return StepOfRanks(
        (rank, step if len(numbers[rank]) == len(step.parameters) else step.only(numbers[rank]))
        for rank, step in steps.items()
    )


def forward_communicates(training: RecordedTraining) -> bool:
    return any(rank.noted(JOINT).get("communicates") for rank in training.ranks)


@lru_cache(maxsize=1)
def model_parts(training: RecordedTraining) -> Set[tuple[int, str]]:
    """Return the optimizer and the name of each parameter of which every rank holds a different part.

    Its initial weights differ between ranks, ranks never step with the same gradient for it, and the model's forward
    communicates. If no forward communicates, the script forgot to synchronise such parameters, unless no module holds
    them, but ranks share others: they may belong to each rank's samples, as weights of their losses do.
    """
    communicates = forward_communicates(training)
    apart = {
        (step.optimizer, name)
        for step in training.steps
        for name in step.noted(MASTERS).get("apart", ())
        if communicates
    }
    shared: set[tuple[int, str]] = set()
    for one in weights_of(training):
        if one.differ("began") and not one.is_wrapped and (communicates or not one.parameter.named):
            apart.add(one.key)
        if one.share_gradient:
            shared.add(one.key)
    return apart - shared if communicates or shared else set()


LAYOUT = "parallelism"

_DATA_DIMENSIONS = frozenset(
    ("data", "data_parallel", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "replicate", "shard")
)
UNKNOWN = "nothing shows that gradients are reduced over all ranks"
"""The reason if no fact tells how the ranks divide the work."""

_SHARDED_LAYOUTS = frozenset(("1: Shard", "1: Replicate", "2: Replicate Shard"))


@dataclass(frozen=True)
class RankLayout:
    """``is_data_parallel``: all ranks hold the same weights, each has its own data, and gradients are reduced.

    ``reason`` says, for a message, why that is known, or why it is not. ``is_sharded``: each rank nevertheless keeps
    only a part of the weights and of the gradients.
    """

    is_data_parallel: bool
    reason: str
    is_sharded: bool = False


def rank_layout(training: RecordedTraining) -> RankLayout:
    """Return how the ranks divide the work. Only what cannot be another parallelism is called data parallel."""
    world = training.world_size
    if world == 1:
        return RankLayout(False, "there is one rank")
    if len(training.ranks) < world:
        return RankLayout(False, f"only {len(training.ranks)} of {world} ranks recorded steps")
    facts: list[Facts] = [rank.noted(LAYOUT) for rank in training.ranks]
    modules = [module for one in facts for module in one.get("modules", ())]
    if (other := _other_parallelism(world, facts, modules)) is not None:
        return RankLayout(False, other)
    wrapped = [(module["wrapper"] or {}).get("ranks") == world for module in modules]
    if wrapped and all(wrapped):
        return RankLayout(True, "DistributedDataParallel wraps the model")
    if modules and all(module["sharded_as_data"] for module in modules):
        return RankLayout(True, "the model is sharded over all ranks", is_sharded=True)
    if all(_reduced_by_hand(rank, world) for rank in training.ranks):
        return RankLayout(True, "the script reduces the gradients over all ranks")
    if all_gradients_are_reduced(training):
        return RankLayout(True, "all ranks step with the same gradients, reduced over them")
    if any(wrapped):
        return RankLayout(False, "DistributedDataParallel wraps only some of the trained modules")
    return RankLayout(False, UNKNOWN)


def _other_parallelism(world: int, facts: Iterable[Facts], modules: Iterable[Facts]) -> str | None:
    hybrid = False
    for module in modules:
        layouts = set(module["layouts"])
        hybrid = hybrid or "2: Replicate Shard" in layouts
        if layouts and not (module["sharded_as_data"] and layouts <= _SHARDED_LAYOUTS):
            return f"{module['class']} distributes its parameters for more than data parallelism"
        if (module["wrapper"] or {}).get("ranks", world) != world:
            return f"DistributedDataParallel covers only {module['wrapper']['ranks']} of {world} ranks"
    for one in facts:
        for mesh in one.get("meshes", ()):
            if not hybrid and not _is_of_data(mesh):
                return f"there is a device mesh {'×'.join(map(str, mesh['shape']))} {tuple(mesh['names'])}"
        if one.get("groups") and not hybrid:
            return f"there are process groups of {one['groups'][0]} of {world} ranks"
    return None


def _is_of_data(mesh: dict[str, Any]) -> bool:
    names = mesh["names"] or [""] * len(mesh["shape"])
    return all(size == 1 or name in _DATA_DIMENSIONS for size, name in zip(mesh["shape"], names, strict=True))


def _reduced_by_hand(rank: RecordedRank, world: int) -> bool:
    """Return whether, at each step, collectives after the backward passes covered at least all parameter entries."""
    noted = [step.noted(LAYOUT) for step in rank.steps if not step.skipped]
    return bool(noted) and all(one and one["reduced"].get(str(world), 0) >= one["entries"] for one in noted)


def drift_apart(training: RecordedTraining) -> tuple[StepOfRanks[RecordedStep], list[RankWeights]] | None:
    """Return the first step that moves equal weights of a module apart which still differ before the next step.

    None if ranks begin apart or share out a sharded model, because they may then train something of their own.
    """
    if rank_layout(training).is_sharded or ranks_begin_apart(training) or weights_are_made_equal(training):
        return None
    before: dict[int, tuple[StepOfRanks[RecordedStep], dict[tuple[int, str], RankWeights]]] = {}
    for steps in training.common_steps:
        weights = {one.key: one for one in weights_at(steps)}
        last, known = before.get(steps.optimizer, (steps, {}))
        apart = [
            one
            for key, one in known.items()
            if one.parameter.named and not one.differ("before") and one.differ("after") and not one.is_rounding
            if key in weights and weights[key].differ("before")
        ]
        if apart:
            return last, apart
        before[steps.optimizer] = steps, weights
    return None
