"""The settings of the ranks' samplers, and the orders that they gave in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedTraining
from plumbline.check.judge.noted import forwards_of, headline_note
from plumbline.core.finding import Finding
from plumbline.judge.causes.samples import SET_EPOCH_NEVER_CALLED, SHARDS_OVERLAP
from plumbline.judge.hypothesis import failed_by

CHECK = "samples"
LEAST = 8
"""Number of indices from which equal orders are not chance: 8! is 40 000."""


def training_samplers(rank: RecordedRank) -> set[int]:
    """Return the numbers of the samplers behind the batches of the recorded forwards in training mode."""
    fetched = [forward["fetched"] for forward in forwards_of(rank, "batches") if forward.get("training")]
    return {one["sampler"] for one in fetched if one is not None and one["sampler"] is not None}


def sampler_passes(rank: RecordedRank) -> Iterator[Facts]:
    """Yield the passes through samplers that a rank trained on, if the sampler is of torch's own class."""
    numbers = training_samplers(rank)
    for one in rank.facts.get("loaders", {}).get("samplers", ()):
        if one["sampler"] in numbers and one["own"]:
            yield one


def same_order_again(training: RecordedTraining) -> Finding | None:
    """Return the failure of a DistributedSampler that shuffles but gives every epoch the same order.

    Passes without an optimizer step do not count, because they only evaluate. If every pass ended early, as when a
    script overfits a few batches, it is a note.
    """
    for rank in training.ranks:
        for passes in _in_one_order(rank):
            observed = (
                f"{len(passes)} epochs have the same order although the sampler shuffles (sampler.epoch is "
                f"{passes[0]['epoch']} in each of them)"
            )
            if not any(one["complete"] for one in passes):
                return headline_note(
                    CHECK,
                    f"{observed}, and each epoch ended early. Call sampler.set_epoch(epoch) "
                    "before each epoch unless this is intended.",
                )
            return failed_by(CHECK, observed, SET_EPOCH_NEVER_CALLED)
    return None


def _in_one_order(rank: RecordedRank) -> Iterator[list[Facts]]:
    trained: dict[int, list[Facts]] = {}
    for one in sampler_passes(rank):
        if one["distributed"] and one.get("shuffle") and one["gradients"] and one["steps"]:
            trained.setdefault(one["sampler"], []).append(one)
    for passes in trained.values():
        orders = {(one["epoch"], one["seed"], one["head"]) for one in passes}
        if len(passes) > 1 and len(orders) == 1 and passes[0]["count"] >= LEAST:
            yield passes


def different_seeds(training: RecordedTraining) -> Finding | None:
    """Return the failure of DistributedSamplers that take their shards from different orders."""
    firsts = {rank.rank: next(sampler_passes(rank), None) for rank in training.ranks}
    known = {rank: one for rank, one in firsts.items() if one is not None and one["distributed"] and one.get("shuffle")}
    if len(known) < training.world_size:
        return None
    for (left, one), (right, other) in combinations(known.items(), 2):
        alike = all(one[name] == other[name] for name in ("num_replicas", "length", "epoch"))
        shared = one["num_replicas"] == training.world_size and one["rank"] != other["rank"]
        if alike and shared and one["seed"] != other["seed"]:
            observed = (
                f"the samplers of ranks {left} and {right} have the seeds {one['seed']} and {other['seed']}: their "
                "shards come from different orders, so an epoch repeats some samples and misses others"
            )
            return failed_by(CHECK, observed, SHARDS_OVERLAP)
    return None


def whole_data_on_every_rank(training: RecordedTraining) -> bool:
    """Return whether each rank goes through a whole data set of the same length, in its own order."""
    firsts = [next(sampler_passes(rank), None) for rank in training.ranks]
    known = [one for one in firsts if one is not None and not one["distributed"] and not one.get("replacement", True)]
    if len(known) < training.world_size or any(one.get("num_samples") != one["length"] for one in known):
        return False
    return len({one["length"] for one in known}) == 1 and len({one["head"] for one in known}) == len(known)
