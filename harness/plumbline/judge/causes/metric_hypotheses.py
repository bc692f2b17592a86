"""Known mistakes in a reported metric: each predicts the values that it would have reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.judge.expected_metrics import (
    HELD_OUT,
    RIGHT,
    TRAINING,
    BatchShares,
    LossMode,
    LossTable,
    ReportedValue,
    mean,
    total,
)
from plumbline.judge.hypothesis import Evidence, Hypothesis, Match, explain, register

Values = Iterable[float]
"""What a hypothesis about a metric predicts."""


@dataclass(frozen=True)
class MetricCase:
    """A wrong report, and the losses whose mean it should have been."""

    losses: LossTable
    report: ReportedValue

    @cached_property
    def windows(self) -> list[BatchShares]:
        """The batch shares over which the mean may be taken: one entry per way to choose them."""
        return self.losses.windows(self.report, RIGHT[self.report.name])

    @cached_property
    def expected_values(self) -> list[float]:
        return self.losses.expected_values(self.report)

    @property
    def held_out(self) -> bool:
        return self.report.name == HELD_OUT

    @property
    def world(self) -> int:
        return self.losses.world

    @property
    def batch_size(self) -> int:
        return self.losses.batch_size

    def of_report(self, **changes: object) -> MetricCase:
        return MetricCase(self.losses, replace(self.report, **changes))  # type: ignore[arg-type]

    def in_state(self, state: LossMode) -> list[float]:
        """Return the means over the windows, and over all held-out samples, in another state."""
        values = [mean(window) for window in self.losses.windows(self.report, state)]
        each = self.losses.each(self.report.position, state) if self.held_out else None
        return values if each is None else [*values, float(each.mean())]


MetricHypothesis = Hypothesis[MetricCase, float]
"""Predicts values as they would have been reported."""


def _by(shares: BatchShares, key: Callable[..., object]) -> list[BatchShares]:
    return [tuple(p for p in shares if key(p) == one) for one in dict.fromkeys(map(key, shares))]


def by_batch(shares: BatchShares) -> list[BatchShares]:
    return _by(shares, lambda share: (share.step, share.batch))


def by_step(shares: BatchShares) -> list[BatchShares]:
    return _by(shares, lambda share: share.step)


def by_rank(shares: BatchShares) -> list[BatchShares]:
    return _by(shares, lambda share: share.rank)


def plain_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_of_means(parts: Sequence[BatchShares]) -> float:
    return plain_mean([mean(part) for part in parts])


def sample_count(shares: BatchShares) -> int:
    return sum(len(share.samples) for share in shares)


@dataclass(frozen=True)
class MetricEvidence(Evidence):
    """The wrong values of one metric."""

    wrong: Sequence[MetricCase]

    @property
    def kind(self) -> type:
        return MetricCase

    def match(self, hypothesis: MetricHypothesis) -> Match | None:
        """Return a match at the first wrong value if the hypothesis predicts all of them within noise."""
        first = self.wrong[0].report
        return Match(first.step, first.rank) if all(_fits(hypothesis, one) for one in self.wrong) else None

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        """Return the message with the metric's name, unless it is the training loss."""
        name = self.wrong[0].report.name
        return super().message(finding, description if name == TRAINING else f"{name}: {description}", hint, match)


def explain_metrics(finding: Finding, wrong: Sequence[ReportedValue], losses: LossTable) -> Finding:
    """Return the finding with the cause of the first metric whose wrong values have one."""
    for name in dict.fromkeys(report.name for report in wrong):
        explained = explain(finding, MetricEvidence([MetricCase(losses, one) for one in wrong if one.name == name]))
        if explained.cause != UNEXPLAINED:
            return explained
    return replace(finding, cause=UNEXPLAINED, family="metrics")


def _fits(hypothesis: MetricHypothesis, case: MetricCase) -> bool:
    return any(case.losses.error(case.report, value) <= case.losses.limit for value in hypothesis.predict(case))


DIGITS = range(1, 7)
"""Numbers of decimals to which logged values are commonly rounded."""


def _of_batches(shares: BatchShares) -> Values:
    yield mean_of_means(by_batch(shares))
    yield plain_mean([share.loss for share in shares])
    yield mean_of_means(by_step(shares))
    yield plain_mean([mean_of_means(by_batch(step)) for step in by_step(shares)])


def _of_ranks(shares: BatchShares) -> Values:
    yield mean_of_means(by_rank(shares))
    yield plain_mean([mean_of_means(by_rank(batch)) for batch in by_batch(shares)])
    yield sum(mean_of_means(by_rank(batch)) * sample_count(batch) for batch in by_batch(shares)) / sample_count(shares)


def _one_ranks_own(case: MetricCase) -> Values:
    for window in case.windows if case.world > 1 else ():
        for own in by_rank(window):
            yield from (mean(own), own[-1].loss)
            yield from _of_batches(own)


def _mean_of_batch_means(case: MetricCase) -> Values:
    for window in case.windows:
        yield from _of_batches(window)


def _mean_of_rank_means(case: MetricCase) -> Values:
    for window in case.windows if case.world > 1 else ():
        yield from _of_ranks(window)


def _last_batch_only(case: MetricCase) -> Values:
    for window in case.windows:
        last = by_batch(window)[-1]
        yield from (mean(last), plain_mean([share.loss for share in last]))


def _repeats_counted(case: MetricCase) -> Values:
    for window in case.windows if case.held_out else ():
        drawn = [i for share in window for i in share.samples]
        if len(drawn) != len(set(drawn)):
            yield mean(window)
            yield from _of_batches(window)
            yield from _of_ranks(window)


def _filled_up_batch(case: MetricCase) -> Values:
    for window in case.windows if case.held_out else ():
        kept = len({i for share in window for i in share.samples})
        losses = [share.loss for share in window for _ in share.samples]
        if kept < len(losses):
            yield plain_mean(losses[:kept])


def _part_of_the_samples(case: MetricCase) -> Values:
    losses = case.losses.each(case.report.position, RIGHT[HELD_OUT]) if case.held_out else None
    if losses is None:
        return
    for window in case.windows:
        seen = sorted({i for share in window for i in share.samples})
        if len(seen) < len(losses):
            yield mean(window)
            yield from _of_batches(window)
            yield float(losses[seen].mean())
    for whole in (case.world, case.batch_size, case.batch_size * case.world):
        yield float(losses[: len(losses) // whole * whole or len(losses)].mean())


def _batch_missing(case: MetricCase) -> Values:
    for window in case.windows:
        batches = by_batch(window)
        for rest in (batches[1:], batches[:-1]) if len(batches) > 1 else ():
            left = tuple(share for batch in rest for share in batch)
            yield mean(left)
            yield from _of_batches(left)
        # A sum that leaves a batch out, divided by the number of all samples.
        for part in (batches[0], batches[-1]):
            yield mean(window) - total(part) / sample_count(window)


def _summed(case: MetricCase) -> Values:
    for window in case.windows:
        means = [mean(batch) for batch in by_batch(window)]
        yield from (total(window), sum(means), sum(share.loss for share in window))
        yield from (sum(mean(own) for own in by_rank(window)), sum(sum(p.loss for p in own) for own in by_rank(window)))
        yield from (sum(share.loss for share in by_batch(window)[-1]), sum(mean(step) for step in by_step(window)))


def _divided_by_full_batches(case: MetricCase) -> Values:
    for window in case.windows:
        yield total(window) / (len(window) * case.batch_size)
        yield sum(share.loss for share in window) / -(-sample_count(window) // case.batch_size)


def _multiplied(factor: Callable[[MetricCase], Iterable[float]]) -> Callable[[MetricCase], Values]:
    def predict(case: MetricCase) -> Iterator[float]:
        bases = [
            *case.expected_values,
            *_last_batch_only(case),
            *_mean_of_batch_means(case),
            *_mean_of_rank_means(case),
        ]
        yield from (value * number for number in factor(case) if number != 1 for value in bases)

    return predict


def _window(case: MetricCase) -> Values:
    for window in case.windows:
        count = len(by_batch(by_step(window)[-1]))
        yield from (float(count), 1 / count)
    accumulate = case.losses.workload.accumulate
    yield from (float(accumulate), 1 / accumulate)


def _epoch(case: MetricCase) -> Values:
    for window in case.windows:
        for count in (len(by_batch(window)), len(by_step(window)), len({p.step for p in window}) * len(window)):
            yield from (float(count), 1 / count)
    batches = case.losses.analysis.epochs.batches
    yield from (float(batches), 1 / batches)


def _scale(case: MetricCase) -> Values:
    moments = case.losses.analysis.steps
    scales = {step.scale for global_step in moments for step in global_step.ranks if step.scale}
    yield from (*scales, *(1 / scale for scale in scales))


def _other_mode(case: MetricCase) -> Values:
    right = RIGHT[case.report.name]
    return case.in_state(LossMode(0, training=not right.training))


def _moved(later: int) -> Callable[[MetricCase], Values]:
    def predict(case: MetricCase) -> Values:
        return case.in_state(LossMode(later, training=RIGHT[case.report.name].training))

    return predict


def _again_after_the_step(case: MetricCase) -> Values:
    yield from _moved(1)(case)
    if not case.held_out:
        yield from case.in_state(LossMode(1, training=False))


def _stale(case: MetricCase) -> Values:
    previous, (steps, micro_batches) = case.report.previous, case.report.position
    before = [(step, 0) for step in range(steps if not micro_batches else steps + 1)]
    for position in (previous, *reversed(before)):
        if position is not None and (position > (0, 0) or case.held_out):
            yield from case.of_report(position=position, previous=None).expected_values


def _never_reset(case: MetricCase) -> Values:
    done = case.losses.until(case.report.position, RIGHT[TRAINING])
    if done and not case.held_out:
        yield mean(done)
        yield from _of_batches(done)


def _of_the_other_samples(case: MetricCase) -> Values:
    steps, micro_batches = case.report.position
    other = case.of_report(name=TRAINING if case.held_out else HELD_OUT, previous=None)
    if (steps, micro_batches) > (0, 0):
        yield from other.expected_values
        yield from _last_batch_only(other)
        yield from _one_ranks_own(other)
    if case.held_out:
        for training in (False, True):
            losses = case.losses.each(case.report.position, LossMode(0, training=training), held_out=False)
            if losses is None:
                continue
            yield float(losses.mean())
            yield float(losses[: len(case.losses.held_out)].mean())
            for window in case.windows:
                drawn = [i for share in window for i in share.samples if i < len(losses)]
                if drawn:
                    yield float(losses[drawn].mean())


def _rounded(case: MetricCase) -> Values:
    for value in case.expected_values:
        if math.isfinite(value):
            yield from (round(value, digits) for digits in DIGITS)
            for dtype in (torch.float16, torch.bfloat16):
                yield float(torch.tensor(value, dtype=torch.float64).to(dtype))


# A later hypothesis can match by accident what an earlier one explains, so it has a smaller specificity.
register(
    MetricCase,
    MetricHypothesis("repeats-counted", "metrics", _repeats_counted,
        "samples that pad the ranks' shares to equal size are counted more than once",
        "exclude padding from the mean, or do not pad", 200),
    MetricHypothesis("filled-up-batch-counted", "metrics", _filled_up_batch,
        "the last batch is padded with samples that were already used, and its mean counts as that of the new ones",
        "keep the last batch short, or keep the loss of each sample", 198),
    MetricHypothesis("part-of-the-samples", "metrics", _part_of_the_samples,
        "some held-out samples are missing from the mean",
        "check whether the last batch, or samples that do not fill every rank's share, are dropped", 195),
    MetricHypothesis("mean-of-batch-means", "metrics", _mean_of_batch_means,
        "batches of unequal size have the same weight",
        "sum loss × samples, and divide by the number of all samples", 190),
    MetricHypothesis("mean-of-rank-means", "metrics", _mean_of_rank_means,
        "ranks with unequal numbers of samples have the same weight",
        "all-reduce the sums and counts first, then divide", 185),
    MetricHypothesis("one-ranks-own-value", "metrics", _one_ranks_own,
        "the value covers one rank's samples only",
        "all-reduce the sums and counts over the ranks first", 180),
    MetricHypothesis("last-batch-only", "metrics", _last_batch_only,
        "the value covers the last batch only",
        "take the mean over all batches since the last report", 175),
    MetricHypothesis("batch-missing", "metrics", _batch_missing,
        "the first or the last batch is left out of the mean",
        "check where the sum over batches begins and ends", 170),
    MetricHypothesis("times-world-size", "metrics", _multiplied(lambda case: (case.world, 1 / case.world)),
        "the value is off by a factor of the world size",
        "average over the ranks once: do not sum, and do not divide twice", 165),
    MetricHypothesis("times-window", "metrics", _multiplied(_window),
        "the value is off by a factor of the number of micro-batches",
        "report the loss before it is divided for the backward, and average over micro-batches", 160),
    MetricHypothesis("summed", "metrics", _summed,
        "the value is a sum, not a mean",
        "divide by the number of samples", 155),
    MetricHypothesis("times-loss-scale", "metrics", _multiplied(_scale),
        "the value is off by the GradScaler's scale",
        "report the loss before it is scaled", 150),
    MetricHypothesis("divided-by-full-batches", "metrics", _divided_by_full_batches,
        "the sum is divided as if the last batch were full",
        "divide by the actual number of samples", 145),
    MetricHypothesis("times-batches", "metrics", _multiplied(_epoch),
        "the value is off by a factor of the number of batches or steps",
        "check what the sum over an epoch is divided by", 140),
    MetricHypothesis("other-mode", "metrics", _other_mode,
        "the loss was computed in the wrong mode",
        "compute the training loss in train() mode and the held-out loss in eval() mode", 135),
    MetricHypothesis("taken-before-the-step", "metrics", _moved(-1),
        "the loss was computed with the weights of the previous step",
        "evaluate after the optimizer's step", 130),
    MetricHypothesis("taken-after-the-step", "metrics", _again_after_the_step,
        "the loss was computed with the weights after the step",
        "report the loss of the forward pass that the step is based on", 125),
    MetricHypothesis("stale", "metrics", _stale,
        "the value belongs to an earlier report or step",
        "update the value before it is reported", 120),
    MetricHypothesis("never-reset", "metrics", _never_reset,
        "the mean is taken over all epochs so far",
        "reset it at the start of each epoch", 115),
    MetricHypothesis("of-other-samples", "metrics", _of_the_other_samples,
        "it is the loss of other samples: training samples instead of held-out ones, or the reverse",
        "check which dataset the metric is computed from", 110),
    MetricHypothesis("rounded", "metrics", _rounded,
        "the value is rounded",
        "report the full number, and round only for display", 105),
)  # fmt: skip
