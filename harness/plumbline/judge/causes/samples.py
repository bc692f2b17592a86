"""Why ranks used the wrong samples: hypotheses about the samples that each rank drew, in its own order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from plumbline.judge import independent_draws
from plumbline.judge.causes.step_count import BATCHES_PER_STEP
from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.trace_analysis import TraceAnalysis

Draws = tuple[tuple[int, ...], ...]
"""One rank's sample ids, by step, in the order in which they went through the model."""


@dataclass(frozen=True, eq=False)
class SampleCase(TraceCase):
    """A trace with other samples than the workload's."""

    @cached_property
    def ranks(self) -> list[Draws]:
        return [
            tuple(tuple(i for micro in step.micro_batches for i in micro.samples) for step in trace.steps)
            for trace in self.analysis.trace.ranks
        ]

    @property
    def dataset_size(self) -> int:
        return len(self.analysis.oracle.data)

    def by_epoch(self, draws: Draws) -> list[Draws]:
        """Cut a rank's steps into epochs: of equal length if possible, else of the workload's length."""
        workload = self.analysis.workload
        length, rest = divmod(len(draws), workload.epochs)
        if rest or not length:
            length = -(-workload.steps_per_epoch // workload.accumulate)
        return [draws[start : start + length] for start in range(0, len(draws), length)]

    @cached_property
    def epochs(self) -> list[tuple[int, tuple[Draws, ...]]]:
        """The first step of each epoch, and what each rank drew in it."""
        epochs, start = [], 0
        for ranks in zip(*map(self.by_epoch, self.ranks), strict=False):
            epochs.append((start, ranks))
            start += len(ranks[0])
        return epochs

    def covers_dataset(self, rank: int) -> bool:
        """Return whether a rank alone goes through the whole dataset once before it starts again."""
        return len(set(_flat(self.ranks[rank])[: self.dataset_size])) == self.dataset_size


class EpochSampleCase(SampleCase):
    """A trace in which every sample is due once an epoch."""


class IterationSampleCase(SampleCase):
    """A trace of a subject that trains by iterations: each rank draws by itself, without epochs."""


SampleHypothesis = Hypothesis[SampleCase, Match]


def sample_case(analysis: TraceAnalysis) -> SampleCase:
    """Return the case to explain; it depends on how the subject declares to draw samples."""
    return IterationSampleCase(analysis) if analysis.behavior.by_iterations else EpochSampleCase(analysis)


def _flat(draws: Iterable[Iterable[int]]) -> list[int]:
    return [i for step in draws for i in step]


def _members_draw_apart(case: SampleCase) -> Iterator[Match]:
    if (found := independent_draws.unlike_members(case.analysis)) is not None:
        step, first, second = found
        yield Match(step, second, {"first": first, "second": second})


def _of_another_dataset(case: SampleCase) -> Iterator[Match]:
    for rank, draws in enumerate(case.ranks):
        for step, ids in enumerate(draws):
            for i in ids:
                if not 0 <= i < case.dataset_size:
                    yield Match(step, rank, {"sample": i, "count": case.dataset_size})


def _loss_of_others(case: SampleCase) -> Iterator[Match]:
    for global_step in case.analysis.steps:
        for rank, step in enumerate(global_step.ranks):
            used = [i for micro in step.micro_batches for i in micro.loss or ()]
            seen = [i for micro in step.micro_batches for i in micro.samples]
            if missing := set(seen) - set(used) if used else set():
                yield Match(global_step.index, rank, {"missing": len(missing), "seen": len(set(seen))})


def _micro_batches_missing(case: SampleCase) -> Iterator[Match]:
    analysis = case.analysis
    due, size = analysis.cell.parallelism.micro_batches, analysis.workload.global_batch_size(analysis.devices)
    sizes = {tuple(len(micro.samples) for micro in step.micro_batches) for step in analysis.trace.ranks[0].steps}
    counts = {len(passes) for passes in sizes}
    if due > 1 and len(counts) == 1 and {number for passes in sizes for number in passes} == {size // due}:
        passed = counts.pop() / analysis.workload.accumulate
        if passed < due:
            yield Match(0, figures={"passed": f"{passed:g}", "due": due})


def _nodes_alike(same_number: Callable[[int, int], int]) -> Callable[[SampleCase], Iterator[Match]]:
    """Return the prediction that ranks choose their samples by a number other than their rank.

    ``same_number`` takes a rank and the number of ranks on a node. Ranks draw the same samples if, and only if, their
    numbers are equal.
    """

    def predict(case: SampleCase) -> Iterator[Match]:
        ranks, nodes = case.ranks, case.analysis.cell.topology.num_nodes
        on_node = len(ranks) // nodes
        without_sampler = len(ranks) == nodes and len({tuple(_flat(draws)) for draws in ranks}) == 1
        if nodes == 1 or len(ranks) % nodes or (without_sampler and case.covers_dataset(0)):
            return
        if _alike_by([same_number(rank, on_node) for rank in range(len(ranks))], ranks):
            yield Match(0)

    return predict


def _alike_by(numbers: Sequence[int], ranks: Sequence[Draws]) -> bool:
    """Return whether ranks draw the same samples if, and only if, they have the same number, and some do."""
    drawn: dict[int, set[Draws]] = {}
    for number, draws in zip(numbers, ranks, strict=True):
        drawn.setdefault(number, set()).add(draws)
    return all(len(alike) == 1 for alike in drawn.values()) and len(set(ranks)) == len(drawn) < len(ranks)


def _along_one_dimension(case: SampleCase) -> Iterator[Match]:
    cell, ranks = case.analysis.cell, case.ranks
    mesh = cell.parallelism.mesh(cell.topology)
    places = [mesh.coordinates(group[0]) for group in case.analysis.replicas[: len(ranks)]]
    divided = [name for name in mesh.names if len({place[name] for place in places}) > 1]
    for name in divided if len(divided) > 1 else ():
        if _alike_by([place[name] for place in places], ranks):
            yield Match(0, figures={"dimension": name})


def _everything_on_every_rank(case: SampleCase) -> Iterator[Match]:
    if len(case.ranks) > 1 and all(map(case.covers_dataset, range(len(case.ranks)))):
        yield Match(0, figures={"count": case.dataset_size})


def _ranks_alike(case: SampleCase) -> Iterator[Match]:
    if len(case.ranks) > 1 and len(set(case.ranks)) == 1:
        yield Match(0)


def _batch_again(case: SampleCase) -> Iterator[Match]:
    for rank, draws in enumerate(case.ranks):
        for step in range(1, len(draws)):
            if draws[step] and draws[step] == draws[step - 1]:
                yield Match(step, rank)


def _batch_drawn_again(case: SampleCase) -> Iterator[Match]:
    if (found := independent_draws.repeated(case.analysis)) is not None:
        yield Match(*found)


def _ranks_draw_alike(case: SampleCase) -> Iterator[Match]:
    if (found := independent_draws.shared(case.analysis)) is not None:
        figures = {"first": found.first, "second": found.second, "count": found.count, "places": found.places}
        yield Match(found.step or 0, found.second, figures)


def _epochs_alike(case: SampleCase) -> int | None:
    """Return the first step of the second epoch if it repeats the first epoch's order on every rank."""
    epochs = [case.by_epoch(draws) for draws in case.ranks]
    if not case.analysis.shuffles or any(len(own) < 2 or _flat(own[0]) != _flat(own[1]) for own in epochs):
        return None
    return len(epochs[0][0])


def _never_shuffled(case: SampleCase) -> Iterator[Match]:
    step = _epochs_alike(case)
    if step is not None and all(_flat(case.by_epoch(d)[0]) == sorted(_flat(case.by_epoch(d)[0])) for d in case.ranks):
        yield Match(step)


def _set_epoch_never_called(case: SampleCase) -> Iterator[Match]:
    if (step := _epochs_alike(case)) is not None:
        yield Match(step)


def _drawn_twice_by_a_rank(case: SampleCase) -> Iterator[Match]:
    for rank, draws in enumerate(case.ranks):
        start = 0
        for epoch in case.by_epoch(draws):
            seen: set[int] = set()
            repeats = 0
            for index, ids in enumerate(epoch):
                repeats += len(ids) - len(set(ids) - seen)
                seen |= set(ids)
                if repeats >= len(case.ranks):  # a sampler's padding has fewer
                    yield Match(start + index, rank, {"repeats": repeats})
            start += len(epoch)


def _last_batch_filled_up(case: SampleCase) -> Iterator[Match]:
    """Match if samples repeat only in the last batch of an epoch, which is as long as the others."""
    size = case.analysis.workload.global_batch_size(case.analysis.devices) // len(case.ranks)
    short = -case.dataset_size % (size * len(case.ranks))
    for start, ranks in case.epochs:
        used = [i for draws in ranks for i in _flat(draws)]
        before = [i for draws in ranks for i in _flat(draws)[:-size]]
        if short and len(used) - len(set(used)) == short and len(set(before)) == len(before):
            yield Match(start + len(ranks[0]) - 1, figures={"short": short})


def _shards_overlap(case: SampleCase) -> Iterator[Match]:
    for start, ranks in case.epochs:
        owner: dict[int, int] = {}
        shared = 0
        for index, steps in enumerate(zip(*ranks, strict=False)):
            for rank, ids in enumerate(steps):
                shared += sum(owner.setdefault(i, rank) != rank for i in ids)
            if shared >= len(case.ranks) > 1:
                yield Match(start + index, figures={"shared": shared})


def _batches_of_another_size(case: SampleCase) -> Iterator[Match]:
    workload = case.analysis.workload
    full = workload.accumulate * workload.global_batch_size(case.analysis.devices) // len(case.ranks)
    for rank, draws in enumerate(case.ranks):
        largest = max(map(len, draws), default=full)
        if largest != full:
            yield Match(0, rank, {"largest": largest, "full": full})


def _never_seen(case: SampleCase) -> Iterator[Match]:
    for start, ranks in case.epochs:
        seen = {i for draws in ranks for i in _flat(draws)}
        if len(seen) < case.dataset_size:
            figures = {"missing": case.dataset_size - len(seen), "count": case.dataset_size}
            yield Match(start + len(ranks[0]) - 1, figures=figures)


_ALWAYS: Sequence[SampleHypothesis] = (
    *BATCHES_PER_STEP,
    SampleHypothesis("replica-of-different-samples", "data", _members_draw_apart,
        "ranks {first} and {second} hold parts of one replica but use different samples",
        "let the sampler count replicas (data_rank, data_ranks) instead of ranks", 205),
    SampleHypothesis("divided-along-one-dimension", "data", _along_one_dimension,
        "samples are divided along mesh dimension {dimension} only, so several ranks use the same ones",
        "let the sampler count all ranks that have their own samples, not only those of one group", 172),
    SampleHypothesis("samples-of-another-dataset", "data", _of_another_dataset,
        "sample {sample} was used, but the training set has {count} samples",
        "train on job.dataset", 190),
    SampleHypothesis("loss-of-other-samples", "data", _loss_of_others,
        "{missing} of {seen} samples that went through the model are missing from the loss",
        "check which outputs and targets are passed to the loss", 185),
    SampleHypothesis("local-rank-for-rank", "launch", _nodes_alike(lambda rank, on_node: rank % on_node),
        "ranks with the same local rank use the same samples on every node",
        "use RANK instead of LOCAL_RANK", 180),
    SampleHypothesis("node-rank-for-rank", "launch", _nodes_alike(lambda rank, on_node: rank // on_node),
        "all ranks of a node use the same samples",
        "use RANK instead of the node's rank", 175),
    SampleHypothesis("micro-batches-missing", "data", _micro_batches_missing,
        "only {passed} of the {due} micro-batches of a batch are computed",
        "check whether the schedule of forwards ends too early", 125),
    SampleHypothesis("batches-of-another-size", "data", _batches_of_another_size,
        "a rank draws {largest} samples per step instead of {full}",
        "check the batch size of its loader", 120),
)  # fmt: skip

register(
    IterationSampleCase,
    *_ALWAYS,
    SampleHypothesis("batch-again", "data", _batch_drawn_again,
        "a batch is used twice in a row",
        "advance the iterator after each batch", 170),
    SampleHypothesis("ranks-alike", "data", _ranks_draw_alike,
        "ranks {first} and {second} draw the same sample in {count} of {places} places",
        "seed each rank's generator with its rank, and do not set it to another rank's state", 165),
)  # fmt: skip

NO_SAMPLER = SampleHypothesis("no-sampler", "data", _everything_on_every_rank,
    "every rank goes through all {count} samples",
    "give each rank its own samples, for example with a DistributedSampler",
    170)  # fmt: skip

RANKS_ALIKE = SampleHypothesis("ranks-alike", "data", _ranks_alike,
    "every rank uses the same samples",
    "pass each rank's own number to the sampler: the rank among all ranks, not the one on its node",
    165)  # fmt: skip

SET_EPOCH_NEVER_CALLED = SampleHypothesis("set-epoch-never-called", "data", _set_epoch_never_called,
    "each epoch repeats the order of the first",
    "call sampler.set_epoch(epoch) before each epoch, and keep no batches for later epochs",
    150)  # fmt: skip

SHARDS_OVERLAP = SampleHypothesis("shards-overlap", "data", _shards_overlap,
    "ranks share {shared} samples within an epoch",
    "give the samplers of all ranks the same seed, and each rank a shard of its own",
    130)  # fmt: skip

register(
    EpochSampleCase,
    *_ALWAYS,
    NO_SAMPLER,
    RANKS_ALIKE,
    SampleHypothesis("batch-again", "data", _batch_again,
        "a batch is used twice in a row",
        "fetch a new batch for each step", 160),
    SampleHypothesis("never-shuffled", "data", _never_shuffled,
        "samples come in the order of the dataset in every epoch",
        "pass shuffle=True to the sampler or the loader", 155),
    SET_EPOCH_NEVER_CALLED,
    SampleHypothesis("last-batch-filled-up", "data", _last_batch_filled_up,
        "the last batch of an epoch is filled up with {short} samples that were already used",
        "keep the last batch short", 148),
    SampleHypothesis("drawn-twice-by-a-rank", "data", _drawn_twice_by_a_rank,
        "a rank draws {repeats} samples again in the same epoch",
        "check where its sampler starts; if the trainer has no epochs, declare data='iterations'", 145),
    SHARDS_OVERLAP,
    SampleHypothesis("samples-never-seen", "data", _never_seen,
        "an epoch of the trainer leaves out {missing} of {count} samples",
        "check whether the end of an epoch or of a shard is dropped", 110),
    SampleHypothesis("shards-kept", "data", holds(lambda case: case.analysis.shuffles),
        "each rank keeps the same samples in every epoch",
        "shuffle the whole dataset first, then cut it into shards", 105),
    SampleHypothesis("order-of-its-own", "data", holds(lambda case: not case.analysis.shuffles),
        "samples do not come in the order of the dataset",
        "check whether something shuffles, or whether the dataset is cut into contiguous shards", 104),
)  # fmt: skip
