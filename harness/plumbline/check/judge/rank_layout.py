"""How the ranks of a training divide the work, as far as the recorded facts show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedTraining
from plumbline.check.judge.rank_weights import all_gradients_are_reduced

OBSERVER = "parallelism"

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
    facts: list[Facts] = [rank.facts.get(OBSERVER, {}) for rank in training.ranks]
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
    noted = [step.facts.get(OBSERVER, {}) for step in rank.steps if not step.skipped]
    return bool(noted) and all(one and one["reduced"].get(str(world), 0) >= one["entries"] for one in noted)
