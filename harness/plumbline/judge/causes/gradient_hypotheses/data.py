"""Samples with the right ids but other contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.layout import Layout, sample_of, samples
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _held_out(case: OracleGradientCase) -> Gradients:
    """Predict training on the samples with the same numbers in the held-out set."""
    counterfactuals = case.counterfactuals
    layout = counterfactuals.layout(case.index)
    with counterfactuals.at(case.index) as oracle:
        training, held_out = oracle.data, counterfactuals.held_out(oracle)
        if max(samples(layout), default=0) >= len(held_out):
            return
        oracle.data = held_out
        parts = oracle.group_gradients(layout)
        oracle.data = training
    yield clipped(mean_gradient(parts), case.clip_norm)


def _of_other_samples(case: OracleGradientCase) -> Gradients:
    """Predict that one column of the data comes from other samples than the rest, on one rank or on all.

    These are neighbours in the batch, the next rank's samples, or the samples of the rank's previous batch.
    """
    counterfactuals, index = case.counterfactuals, case.index
    batches = _batches(counterfactuals.layout(index))
    before = counterfactuals.analysis.layouts.get(index - 1)
    if case.is_staged or not batches:
        return
    everyone = range(len(batches[0]))
    columns = counterfactuals.analysis.oracle.data.columns
    for others in _taken_for(batches, _batches(before)[-1] if before else ()):
        for ranks in (everyone, *([rank] for rank in everyone if len(everyone) > 1)):
            own: list[int] = []
            found: list[int] = []
            for batch, other in zip(batches, others, strict=True):
                for rank in ranks:
                    if rank < min(len(batch), len(other)) and len(batch[rank]) == len(other[rank]):
                        own += batch[rank]
                        found += other[rank]
            for name in columns.keys() - {"index"} if own != found else ():
                column = columns[name].clone()
                column[own] = columns[name][found]
                yield from case.if_wrong(clipped(counterfactuals.with_column(index, name, column), case.clip_norm))


Batch = Sequence[Sequence[int]]
"""The samples of each rank."""


def _batches(layout: Layout) -> list[Batch]:
    """Return the samples of each group, micro-batch by micro-batch."""
    return [[[sample_of(i) for share in group for i in share] for group in groups] for groups in layout]


def _taken_for(batches: Sequence[Batch], before: Batch) -> Iterator[Sequence[Batch]]:
    """Yield the samples that each batch is taken for; ``before`` is the last batch of the previous step."""
    for shift in (1, -1):
        yield [[[*own[shift:], *own[:shift]] for own in batch] for batch in batches]
        yield [[*batch[shift:], *batch[:shift]] for batch in batches]
    yield [before, *batches[:-1]]


HYPOTHESES = (
    GradientHypothesis("trained-on-held-out-data", "data", _held_out,
        "those of the held-out samples",
        "check whether a loader of the validation set is used for training", 210),
    GradientHypothesis("of-other-samples", "data", _of_other_samples,
        "those of samples that have the inputs or the targets of others",
        "shuffle, shard and collate inputs and targets in the same way", 207),
)  # fmt: skip
