"""Why ranks used other samples than they should: hypotheses about what each rank drew, in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.core.finding import Finding
from harness.judge.causes.cause import Cause, explained
from harness.judge.causes.step_count import pace
from harness.judge.sampler_draws import repeated
from harness.judge.sampler_draws import shared as shared_draws
from harness.judge.trace_analysis import TraceAnalysis

Draws = tuple[tuple[int, ...], ...]
"""One rank's sample ids, by step, in the order in which they went through the model."""


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about the samples with a cause: the first hypothesis that what was drawn does not refute."""
    ranks = [
        tuple(tuple(i for micro in step.micro_batches for i in micro.samples) for step in trace.steps)
        for trace in analysis.trace.ranks
    ]
    always = (
        pace(analysis),
        _strangers(ranks, analysis),
        _loss_given_others(analysis),
        _nodes_alike(ranks, analysis),
    )
    if analysis.behavior.by_iterations:
        return explained(finding, *always, _drawn_again(analysis), _drawn_alike(analysis), _other_size(ranks, analysis))
    return explained(
        finding,
        *always,
        _everybody_sees_everything(ranks, analysis),
        _all_alike(ranks),
        _batch_again(ranks),
        _epochs_alike(ranks, analysis),
        _drawn_twice_by_a_rank(ranks, analysis),
        _filled_up(ranks, analysis),
        _shards_overlap(ranks, analysis),
        _other_size(ranks, analysis),
        _never_seen(ranks, analysis),
        _order(analysis),
    )


def _flat(draws: Iterable[Iterable[int]]) -> list[int]:
    return [i for step in draws for i in step]


def _epochs(draws: Draws, analysis: TraceAnalysis) -> list[Draws]:
    """Cut a rank's steps into epochs: equal ones if they can be, else such as the workload's."""
    workload = analysis.workload
    length, rest = divmod(len(draws), workload.epochs)
    if rest or not length:
        length = -(-workload.steps_per_epoch // workload.accumulate)
    return [draws[start : start + length] for start in range(0, len(draws), length)]


def _strangers(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    count = len(analysis.oracle.data)
    for rank, draws in enumerate(ranks):
        for step, ids in enumerate(draws):
            if any(not 0 <= i < count for i in ids):
                look = "is it the training set that is trained on?"
                return Cause("samples-of-another-dataset", "data", look, step=step, rank=rank)
    return None


def _loss_given_others(analysis: TraceAnalysis) -> Cause | None:
    for global_step in analysis.steps:
        for rank, step in enumerate(global_step.ranks):
            given = [i for micro in step.micro_batches for i in micro.loss or ()]
            seen = [i for micro in step.micro_batches for i in micro.samples]
            if given and any(micro.loss is not None for micro in step.micro_batches) and not set(given) >= set(seen):
                look = "which samples is the loss taken of?"
                return Cause("loss-of-other-samples", "data", look, step=global_step.index, rank=rank)
    return None


def _nodes_alike(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    """Ranks that share a local rank, or a node, draw the same: one number was taken for another."""
    nodes = analysis.cell.topology.num_nodes
    if nodes == 1 or (len(ranks) == nodes and len(set(map(_everything, ranks))) == 1 and _whole(ranks[0], analysis)):
        return None
    on_node = len(ranks) // nodes
    by_local_rank = [{ranks[node * on_node + local] for node in range(nodes)} for local in range(on_node)]
    if all(len(alike) == 1 for alike in by_local_rank) and len(set(ranks)) == on_node:
        look = "ranks of different nodes use the same samples: is LOCAL_RANK taken for RANK?"
        return Cause("local-rank-for-rank", "launch", look, step=0)
    by_node = [set(ranks[node * on_node : (node + 1) * on_node]) for node in range(nodes)]
    if all(len(alike) == 1 for alike in by_node) and len(set(ranks)) == nodes and on_node > 1:
        look = "the ranks of a node use the same samples: is the node's number taken for RANK?"
        return Cause("node-rank-for-rank", "launch", look, step=0)
    return None


def _everything(draws: Draws) -> tuple[int, ...]:
    return tuple(_flat(draws))


def _whole(draws: Draws, analysis: TraceAnalysis) -> bool:
    """Say whether a rank alone goes through the whole dataset, once, before it begins again."""
    count = len(analysis.oracle.data)
    return len(set(_flat(draws)[:count])) == count


def _everybody_sees_everything(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    if len(ranks) > 1 and all(_whole(draws, analysis) for draws in ranks):
        look = "every rank goes through the whole dataset: is there a DistributedSampler?"
        return Cause("no-sampler", "data", look, step=0)
    return None


def _all_alike(ranks: Sequence[Draws]) -> Cause | None:
    if len(ranks) > 1 and len(set(ranks)) == 1:
        look = "every rank uses the same samples: is the sampler told the rank?"
        return Cause("ranks-alike", "data", look, step=0)
    return None


def _batch_again(ranks: Sequence[Draws]) -> Cause | None:
    for rank, draws in enumerate(ranks):
        for step in range(1, len(draws)):
            if draws[step] and draws[step] == draws[step - 1]:
                return Cause("batch-again", "data", "a batch is used twice in a row", step=step, rank=rank)
    return None


def _drawn_again(analysis: TraceAnalysis) -> Cause | None:
    if (found := repeated(analysis)) is None:
        return None
    return Cause("batch-again", "data", "a batch is used twice in a row", step=found[0], rank=found[1])


def _drawn_alike(analysis: TraceAnalysis) -> Cause | None:
    if (found := shared_draws(analysis)) is None:
        return None
    look = "is each rank's generator seeded with its rank, and never set to another's state?"
    return Cause("ranks-alike", "data", look, step=found.step or 0, rank=found.second)


def _epochs_alike(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    if not analysis.shuffles:
        return None
    epochs = [_epochs(draws, analysis) for draws in ranks]
    if any(len(own) < 2 or _flat(own[0]) != _flat(own[1]) for own in epochs):
        return None
    step = len(epochs[0][0])
    if all(_flat(own[0]) == sorted(_flat(own[0])) for own in epochs):
        return Cause("never-shuffled", "data", "samples come in the order of the dataset", step=step)
    look = "each epoch has the order of the first: is set_epoch called, or is a loader's output kept?"
    return Cause("set-epoch-never-called", "data", look, step=step)


def _drawn_twice_by_a_rank(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    for rank, draws in enumerate(ranks):
        start = 0
        for epoch in _epochs(draws, analysis):
            seen: set[int] = set()
            repeats = 0
            for place, ids in enumerate(epoch):
                repeats += len(ids) - len(set(ids) - seen)
                seen |= set(ids)
                if repeats >= len(ranks):  # as many as a sampler's padding never has
                    look = (
                        "a rank draws samples twice in an epoch: from the wrong place? A trainer that knows no epoch "
                        "declares data='iterations'"
                    )
                    return Cause("drawn-twice-by-a-rank", "data", look, step=start + place, rank=rank)
            start += len(epoch)
    return None


def _filled_up(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    """Nobody draws twice, apart from the last batch of an epoch, which is as long as the others on every rank."""
    size = analysis.workload.global_batch_size(analysis.devices) // len(ranks)
    short = -len(analysis.oracle.data) % (size * len(ranks))
    start = 0
    for columns in zip(*(_epochs(draws, analysis) for draws in ranks), strict=False):
        used = [i for draws in columns for i in _flat(draws)]
        before = [i for draws in columns for i in _flat(draws)[:-size]]
        start += len(columns[0])
        if short and len(used) - len(set(used)) == short and len(set(before)) == len(before):
            look = "the last batch is filled up, to its full size, with samples that were used already"
            return Cause("last-batch-filled-up", "data", look, step=start - 1)
    return None


def _shards_overlap(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    """Ranks have samples in common within an epoch, more than a sampler pads with."""
    start = 0
    for columns in zip(*(_epochs(draws, analysis) for draws in ranks), strict=False):
        owner: dict[int, int] = {}
        shared = 0
        for place, steps in enumerate(zip(*columns, strict=False)):
            for rank, ids in enumerate(steps):
                shared += sum(owner.setdefault(i, rank) != rank for i in ids)
            if shared >= len(ranks) > 1:
                look = "ranks share samples: is the sampler's seed the same on every rank, are shards cut apart?"
                return Cause("shards-overlap", "data", look, step=start + place)
        start += len(columns[0])
    return None


def _other_size(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    workload = analysis.workload
    full = workload.accumulate * workload.global_batch_size(analysis.devices) // len(ranks)
    for rank, draws in enumerate(ranks):
        sizes = [len(ids) for ids in draws]
        if sizes and max(sizes) != full:
            look = f"a rank draws {max(sizes)} samples a step, not {full}: which batch size was its loader given?"
            return Cause("batches-of-another-size", "data", look, step=0, rank=rank)
    return None


def _never_seen(ranks: Sequence[Draws], analysis: TraceAnalysis) -> Cause | None:
    count = len(analysis.oracle.data)
    start = 0
    for columns in zip(*(_epochs(draws, analysis) for draws in ranks), strict=False):
        start += len(columns[0])
        seen = {i for draws in columns for i in _flat(draws)}
        if len(seen) < count:
            look = "the end of an epoch, or of a shard, is dropped"
            return Cause("samples-never-seen", "data", look, step=start - 1)
    return None


def _order(analysis: TraceAnalysis) -> Cause | None:
    if analysis.shuffles:
        return Cause("shards-kept", "data", "shuffle the whole dataset, then cut it into shards")
    return Cause("order-of-its-own", "data", "is something shuffled, or cut into contiguous shards?")
