"""Checks that data-parallel ranks use different rows, and that an epoch has another order than the previous one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedTraining
from plumbline.check.judge.noted import (
    IF_INTENDED,
    STEPS_WITHIN_PASSES,
    failed_observers,
    forwards_of,
    headline_note,
    information,
    name_ranks,
    not_judged,
    passes_of,
    steps_within_passes,
)
from plumbline.check.judge.rank_weights import RankLayout, rank_layout
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.causes.samples import NO_SAMPLER, RANKS_ALIKE, SET_EPOCH_NEVER_CALLED, SHARDS_OVERLAP
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.judge.hypothesis import failed_by

CHECK = "samples"
CHANCE = math.log(1e-8)
"""Logarithm of the probability below which equal rows are not taken for chance."""

CHANCE_OF_NOTE = math.log(1e-2)
"""The same for a note, which says what was seen, and is no failure."""

ALIKE = 0.1
"""Relative distance of two ranks' gradients below which both used the same targets in the same way.

Chosen: rounding to 16 bits causes a hundredth of it, and different targets several times as much. It applies only to
ranks with equal inputs. If their gradients are further apart, no failure is reported.
"""


def judge_rows_used(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one failure, or what is known about the rows that the ranks used."""
    yield from failed_observers(training, "batches", CHECK)
    layout = rank_layout(training)
    repeated = _workers_alike(training) or same_order_again(training)
    if repeated is not None:
        yield repeated
    if repeated is None or not repeated.outcome.is_bad:
        yield from _rows(training, layout)


def _workers_alike(training: RecordedTraining) -> Finding | None:
    """Return the failure where every process of a loader iterates over the same samples of an iterable data set.

    Batches come from the processes in turn, so each batch then comes as often as there are processes. If all batches of
    the recorded steps are equal, the data set may consist of one batch.
    """
    for one in (one for rank in training.ranks for one in rank.noted("loaders").get("loaders", ())):
        workers, batches = one.get("workers", 0), one["batches"]
        if workers > 1 and batches > workers and one["repeated"] == batches - math.ceil(batches / workers):
            return failed_with_hint(
                CHECK,
                f"all {workers} worker processes of a loader yield the same batches, so each batch is used "
                f"{_times(workers)}",
                "divide the samples over the workers in the __iter__ of the IterableDataset, with "
                "torch.utils.data.get_worker_info()",
                cause="workers-alike",
                family="data",
            )
    return None


def _rows(training: RecordedTraining, layout: RankLayout) -> Iterator[Finding]:
    finding = None
    if layout.is_data_parallel:
        finding = different_seeds(training) or _whole_data_everywhere(training) or _data_sets_differ(training)
    if finding is not None:
        yield finding
        return
    alike = [ranks for ranks in _ranks_with_the_same_rows(training) if len(ranks) > 1]
    if alike:
        yield _alike(training, layout, max(alike, key=len))
        return
    if layout.is_data_parallel and (note := _overlap(training)) is not None:
        yield note
    if (rows := _rows_used(training, _undivided(training) if layout.is_data_parallel else 0)) is not None:
        yield rows


def _forwards(rank: RecordedRank) -> list[Facts]:
    """Return the training-mode forwards of a rank, or all of its forwards if there are none."""
    forwards = forwards_of(rank, "batches")
    return [one for one in forwards if one["training"]] or forwards


def _ranks_with_the_same_rows(training: RecordedTraining) -> list[list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    shortest = min(len(_forwards(rank)) for rank in training.ranks)
    for rank in training.ranks:
        orders = tuple(forward.get("order", "") for forward in _forwards(rank)[:shortest])
        if any(orders):
            groups.setdefault(orders, []).append(rank.rank)
    return list(groups.values())


def all_use_different_rows(training: RecordedTraining) -> bool:
    """Return whether no two ranks use the same rows in all recorded forwards, and the rows are known."""
    groups = _ranks_with_the_same_rows(training)
    return sum(map(len, groups)) == training.world_size == len(groups)


def all_use_the_same_rows(training: RecordedTraining) -> bool:
    """Return whether all ranks use the same rows in all recorded forwards."""
    return [len(ranks) for ranks in _ranks_with_the_same_rows(training)] == [training.world_size]


def _alike(training: RecordedTraining, layout: RankLayout, ranks: list[int]) -> Finding:
    by_number = {rank.rank: rank for rank in training.ranks}
    forwards = [forward for forward in _forwards(by_number[ranks[0]]) if "order" in forward]
    who = name_ranks(ranks, training.world_size)
    observed = f"{who} use the same rows in all {len(forwards)} recorded forwards"
    if (innocent := _innocent(training, layout, [by_number[rank] for rank in ranks], forwards)) is not None:
        return information(CHECK, f"{observed}; {innocent}")
    sampler = next(sampler_passes(by_number[ranks[0]]), None)
    if sampler is None or not sampler["distributed"]:
        finding = failed_by(CHECK, f"{observed}, so they do the same work {_times(len(ranks))}", NO_SAMPLER)
        return finding if len(ranks) == training.world_size else replace(finding, cause=RANKS_ALIKE.name)
    settings = f"rank {sampler.get('rank')} of {sampler.get('num_replicas')}"
    return failed_by(CHECK, f"{observed}, and all their samplers are created for {settings}", RANKS_ALIKE)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _innocent(
    training: RecordedTraining, layout: RankLayout, ranks: Sequence[RecordedRank], forwards: Sequence[Facts]
) -> str | None:
    if not layout.is_data_parallel:
        return f"{IF_INTENDED}{layout.reason}"
    own = _of_first_module(forwards)
    batches = {forward["order"] for forward in own}
    if 2 * len(batches) <= len(own) or len(batches) == 1:
        return "the script repeats the same batches, as a benchmark does"
    if min(_chance(_different_rows(own)), _chance_of_order(own)) > CHANCE:
        return "too few rows differ to tell whether the data set itself repeats rows"
    targets = {_targets(rank) for rank in ranks}
    if len(targets) > 1:
        return "but their targets differ"
    # Shards of gradients cannot be compared, and gradients with different dropout masks differ. In these cases, equal
    # rows and targets are enough.
    if (layout.is_sharded or _random(ranks)) and all(targets):
        return None
    return None if _gradients_alike(ranks) else "but they compute different gradients from them"


def _of_first_module(forwards: Sequence[Facts]) -> list[Facts]:
    """Return the forwards of the module that was called first. Modules inside or after it get the same batches."""
    return [forward for forward in forwards if forward["module"] == forwards[0]["module"]]


def _different_rows(batches: Iterable[Facts]) -> int:
    """Return the number of rows in the batches before the first one that repeats a row."""
    seen: set[int] = set()
    for batch in batches:
        rows = set(batch["hashes"])
        if batch["distinct"] < batch["rows"] or rows & seen:
            break
        seen |= rows
    return len(seen)


def _chance(rows: int) -> float:
    """Return the log of the largest probability that two ranks draw the same ``rows`` distinct rows in the same order.

    For n equally likely values, it is n! (1/n)^(2n); for others it is less. Data that repeat themselves are thus no
    evidence.
    """
    return math.lgamma(rows + 1) - 2 * rows * math.log(rows) if rows else 0.0


def _targets(rank: RecordedRank) -> tuple[str, ...]:
    return tuple(call["targets"] for one in passes_of(rank) for call in one.noted("objective").get("calls", ()))


def _random(ranks: Sequence[RecordedRank]) -> bool:
    return any(forward["drew"] for rank in ranks for forward in forwards_of(rank, "generators"))


def _gradients_alike(ranks: Sequence[RecordedRank]) -> bool:
    first, *others = [passes_of(rank) for rank in ranks]
    for other in others:
        for one, same in zip(first, other, strict=False):
            apart = one.local.shape != same.local.shape or (one.local - same.local).norm() > ALIKE * one.local.norm()
            if apart:
                return False
    return True


def _chance_of_order(batches: Sequence[Facts]) -> float:
    """Return the log of the largest probability that two ranks draw repeating rows in the same order.

    If each rank shuffles k different rows by itself, the orders are equal with the probability 1 / k!. Rows that each
    rank draws by itself are equal less often. Rows in runs, and data that repeat themselves, are no evidence: in these,
    each row is always followed by the same row. Data with few rows are no evidence either.
    """
    if any(len(one["hashes"]) < one["rows"] for one in batches):
        return 0.0
    rows = [row for row, _ in groupby(row for one in batches for row in one["hashes"])]
    rows = rows[: _period(rows)]
    if len(set(pairwise(rows))) == len(set(rows[:-1])):
        return 0.0
    chance, seen = 0.0, set[int]()
    for row in rows:
        if row in seen:
            seen = set()
        seen.add(row)
        chance -= math.log(len(seen))
    return max(chance, _chance(len(set(rows))))


def _period(rows: Sequence[int]) -> int:
    """Return the number of rows after which all repeat in the same order, or the number of all rows if none do."""
    return next((one for one in range(1, len(rows) // 2 + 1) if rows[one:] == rows[:-one]), len(rows))


def _whole_data_everywhere(training: RecordedTraining) -> Finding | None:
    if not whole_data_on_every_rank(training):
        return None
    shared, chance = _shared_rows(training)
    if chance > CHANCE:
        return None
    observed = "each rank goes through the whole data set in its own order: several ranks used"
    return failed_by(CHECK, f"{observed} {counted(shared, 'row')} in the same epoch", NO_SAMPLER)


def _data_sets_differ(training: RecordedTraining) -> Finding | None:
    """Return the failure of samplers that divide one order of indices, although rows overlap: the data sets differ."""
    known = _shuffled_shards(training).values()
    if {one["rank"] for one in known} != set(range(training.world_size)):
        return None
    shared, chance = _shared_rows(training)
    if chance > CHANCE:
        return None
    return failed_with_hint(
        CHECK,
        f"several ranks used {counted(shared, 'row')} in the same epoch, although their samplers divide one order: the "
        "data sets of the ranks differ",
        "split and shuffle the data set with the same seed on all ranks",
        cause=SHARDS_OVERLAP.name,
        family=SHARDS_OVERLAP.family,
    )


def _overlap(training: RecordedTraining) -> Finding | None:
    """Return a note on rows that several ranks used, if they are hardly parts of one order."""
    shared, chance = _shared_rows(training)
    if chance > CHANCE_OF_NOTE:
        return None
    return headline_note(
        CHECK,
        f"Several ranks used {counted(shared, 'row')} of the recorded steps, and no rank used one twice. If ranks "
        "should divide the data, shuffle and split it with the same seed on all ranks, and give each rank its own part "
        "of this order.",
    )


def _shared_rows(training: RecordedTraining) -> tuple[int, float]:
    """Return how many rows several ranks used in one epoch, and the log of the chance that no rank got a row twice.

    If the data had m equal rows and dealt them out at random, they would be on m different ranks of w with the
    probability w! / ((w - m)! w^m).
    """
    world, shared, chance = training.world_size, 0, 0.0
    for ranks in _rows_by_epoch(training):
        if any(times > 1 for rows in ranks for times in rows.values()):
            return 0, 0.0
        for copies in Counter(row for rows in ranks for row in rows).values():
            shared += copies > 1
            chance += math.lgamma(world + 1) - math.lgamma(world - copies + 1) - copies * math.log(world)
    return shared, chance


def _rows_by_epoch(training: RecordedTraining) -> list[list[Counter[int]]]:
    """Return the rows that each rank used in each pass through a loader. Rows without a loader form one epoch."""
    by_epoch: dict[tuple[int, int] | None, list[Counter[int]]] = {}
    for rank in training.ranks:
        own: dict[tuple[int, int] | None, Counter[int]] = {}
        for forward in _forwards(rank):
            fetched = forward["fetched"]
            epoch = None if fetched is None else (fetched["loader"], fetched["pass"])
            if forward.get("hashes") and forward["module"] == 0:
                own.setdefault(epoch, Counter()).update(forward["hashes"])
        for epoch, rows in own.items():
            by_epoch.setdefault(epoch, []).append(rows)
    return list(by_epoch.values())


def _rows_used(training: RecordedTraining, undivided: int) -> Finding | None:
    forwards = [_of_first_module([one for one in _forwards(rank) if "order" in one]) for rank in training.ranks]
    if not any(forwards):
        why = STEPS_WITHIN_PASSES if steps_within_passes(training) else "no recorded module was called with a tensor"
        return not_judged(CHECK, why)
    if training.world_size == 1 or len(training.ranks) < training.world_size:
        return None
    parts = []
    counts = [len(own) for own in forwards]
    rows = [sum(one["rows"] for one in own) for own in forwards]
    if len(set(counts)) > 1:
        parts.append(f"ranks ran different numbers of forwards, {min(counts)} to {max(counts)}")
    elif len(set(rows)) > 1:
        parts.append(f"ranks used different numbers of rows, {min(rows)} to {max(rows)}")
    copies = [Counter(row for rows in ranks for row in rows) for ranks in _rows_by_epoch(training)]
    common = sum(times > 1 for epoch in copies for times in epoch.values())
    if common:
        parts.append(f"several ranks used {counted(common, 'row')} in the same epoch")
    if any(_repeats_an_epoch(own) for own in forwards):
        parts.append("an epoch has the same order as the previous one")
    total = f"({sum(rows):,} rows in the recorded steps)"
    used = f"{'; '.join(parts) or 'no two ranks used the same row in an epoch'} {total}"
    if undivided:  # random augmentations make different rows of the same sample
        return information(
            CHECK,
            f"{used}; each rank shuffles a data set of {counted(undivided, 'sample')} by itself. If it is the same on "
            "all ranks, divide it with a DistributedSampler",
        )
    return information(CHECK, used) if parts else passed(CHECK, used)


def _repeats_an_epoch(forwards: Sequence[Facts]) -> bool:
    """Return whether two passes through one loader have the same batch in the same place."""
    seen: dict[tuple[int, int, str], int] = {}
    for one in forwards:
        if (fetched := one["fetched"]) is not None:
            earlier = seen.setdefault((fetched["loader"], fetched["batch"], one["order"]), fetched["pass"])
            if earlier != fetched["pass"]:
                return True
    return False


LEAST = 8
"""Number of indices from which equal orders are not chance: 8! is 40 000."""


def training_samplers(rank: RecordedRank) -> set[int]:
    """Return the numbers of the samplers behind the batches of the recorded forwards in training mode."""
    fetched = [forward["fetched"] for forward in forwards_of(rank, "batches") if forward.get("training")]
    return {one["sampler"] for one in fetched if one is not None and one["sampler"] is not None}


def sampler_passes(rank: RecordedRank) -> Iterator[Facts]:
    """Yield the passes through samplers that a rank trained on, if their order is known."""
    numbers = training_samplers(rank)
    for one in rank.noted("loaders").get("samplers", ()):
        if one["sampler"] in numbers:
            yield one


def same_order_again(training: RecordedTraining) -> Finding | None:
    """Return the failure of a sampler that shuffles, and has a ``set_epoch``, but gives every epoch the same order.

    Passes without an optimizer step do not count, because they only evaluate. If every pass ended early, as when a
    script overfits a few batches, or if it is not known whether the sampler shuffles, it is a note.
    """
    for rank in training.ranks:
        for passes in _in_one_order(rank):
            shuffles = " although the sampler shuffles" if passes[0].get("shuffle") else ""
            observed = (
                f"{len(passes)} epochs have the same order{shuffles} (sampler.epoch is "
                f"{passes[0]['epoch']} in each of them)"
            )
            early = "" if any(one["complete"] for one in passes) else ", and each epoch ended early"
            if early or not shuffles:
                return headline_note(
                    CHECK,
                    f"{observed}{early}. Call sampler.set_epoch(epoch) before each epoch unless this is intended.",
                )
            return failed_by(CHECK, observed, SET_EPOCH_NEVER_CALLED)
    return None


def _in_one_order(rank: RecordedRank) -> Iterator[list[Facts]]:
    trained: dict[int, list[Facts]] = {}
    for one in sampler_passes(rank):
        if "epoch" in one and one.get("shuffle", True) and one["gradients"] and one["steps"]:
            trained.setdefault(one["sampler"], []).append(one)
    for passes in trained.values():
        orders = {(one["epoch"], one.get("seed"), one["head"]) for one in passes}
        if len(passes) > 1 and len(orders) == 1 and passes[0]["count"] >= LEAST:
            yield passes


def different_seeds(training: RecordedTraining) -> Finding | None:
    """Return the failure of DistributedSamplers that take their shards from different orders."""
    known = _shuffled_shards(training)
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


def _shuffled_shards(training: RecordedTraining) -> dict[int, Facts]:
    """Return the first pass of each rank if all come from torch's DistributedSampler, and shuffle."""
    firsts = {rank.rank: next(sampler_passes(rank), None) for rank in training.ranks}
    known = {rank: one for rank, one in firsts.items() if one is not None and one["distributed"] and one.get("shuffle")}
    return known if len(known) == training.world_size and all(one["torch"] for one in known.values()) else {}


def whole_data_on_every_rank(training: RecordedTraining) -> bool:
    """Return whether each rank goes through a whole data set of the same length, in its own order."""
    heads = {first["head"] for rank in training.ranks if (first := next(sampler_passes(rank), None)) is not None}
    return bool(_undivided(training)) and len(heads) == training.world_size


def _undivided(training: RecordedTraining) -> int:
    """Return the length of the data set that each rank shuffles as a whole, 0 if the ranks do anything else."""
    firsts = [next(sampler_passes(rank), None) for rank in training.ranks]
    known = [one for one in firsts if one is not None and not one["distributed"] and not one.get("replacement", True)]
    if len(known) < training.world_size or any(one.get("num_samples") != one["length"] for one in known):
        return 0
    if len({one["head"] for one in known}) == 1 and all(map(_loads_a_part, training.ranks, known)):
        return 0  # the ranks share one order, and a batch sampler, such as that of Accelerate, deals out its batches
    lengths = {one["length"] for one in known}
    return int(lengths.pop() or 0) if len(lengths) == 1 else 0


def _loads_a_part(rank: RecordedRank, order: Facts) -> bool:
    """Return whether a loader has too few batches for all samples of the order that it draws from."""
    rows = max((one["rows"] for one in _forwards(rank) if "rows" in one), default=0)
    lengths = [one["length"] for one in rank.noted("loaders").get("loaders", ()) if one["sampler"] == order["sampler"]]
    return bool(lengths) and all(one is not None and (one + 1) * rows <= order["length"] for one in lengths)
