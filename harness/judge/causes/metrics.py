"""Why a reported figure is not true: each known mistake predicts the values that it would have reported.

The first mistake, in the order of the list at the end, that predicts every wrong value of one name is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from harness.core.finding import Finding
from harness.judge.causes.cause import Cause, explained
from harness.judge.oracle.expected_metrics import (
    HELD_OUT,
    RIGHT,
    TRAINING,
    BatchShares,
    LossMode,
    LossTable,
    Report,
    mean,
    total,
)

DIGITS = range(1, 7)
"""Decimals to which people round what they log."""


@dataclass(frozen=True)
class Scene:
    """One wrong value, and what a prediction may be made from."""

    books: LossTable
    report: Report

    @cached_property
    def windows(self) -> list[BatchShares]:
        """What the mean may be taken over."""
        return self.books.windows(self.report, RIGHT[self.report.name])

    @cached_property
    def truths(self) -> list[float]:
        """The values that are right."""
        return self.books.expected_values(self.report)

    @property
    def held_out(self) -> bool:
        """Whether it is about the held-out samples."""
        return self.report.name == HELD_OUT

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.books.world

    @property
    def rows(self) -> int:
        """How many samples a rank draws at once."""
        return self.books.batch_size

    def elsewhere(self, **changes: object) -> Scene:
        """Return the scene of a report that differs."""
        return Scene(self.books, replace(self.report, **changes))  # type: ignore[arg-type]

    def in_state(self, state: LossMode) -> list[float]:
        """Return the means over the windows, and over all held-out samples, in another state."""
        values = [mean(window) for window in self.books.windows(self.report, state)]
        losses = self.books.each(self.report.place, state) if self.held_out else None
        return values if losses is None else [*values, float(losses.mean())]


Values = Iterable[float]


@dataclass(frozen=True)
class Mistake:
    """A known mistake: the values that it would report, and where to look."""

    name: str
    look: str
    predict: Callable[[Scene], Values]


def explain(finding: Finding, wrong: Sequence[Report], books: LossTable) -> Finding:
    """Return the finding with the first mistake that predicts every wrong value of a name."""
    for name in dict.fromkeys(report.name for report in wrong):
        scenes = [Scene(books, report) for report in wrong if report.name == name]
        for mistake in MISTAKES:
            if all(_fits(mistake, scene) for scene in scenes):
                look = mistake.look if name == TRAINING else f"{name}: {mistake.look}"
                first = scenes[0].report
                return Cause(mistake.name, "metrics", look, step=first.step, rank=first.rank).explain(finding)
    return replace(explained(finding), family="metrics")


def _fits(mistake: Mistake, scene: Scene) -> bool:
    report, books = scene.report, scene.books
    return any(books.error(report, value) <= books.limit for value in mistake.predict(scene))


def _by(portions: BatchShares, key: Callable[..., object]) -> list[BatchShares]:
    """Return the portions that have something in common, each such part by itself."""
    return [tuple(p for p in portions if key(p) == one) for one in dict.fromkeys(map(key, portions))]


def _batches(portions: BatchShares) -> list[BatchShares]:
    return _by(portions, lambda portion: (portion.step, portion.batch))


def _steps(portions: BatchShares) -> list[BatchShares]:
    return _by(portions, lambda portion: portion.step)


def _ranks(portions: BatchShares) -> list[BatchShares]:
    return _by(portions, lambda portion: portion.rank)


def _plain(values: Sequence[float]) -> float:
    """Return the mean of numbers that all weigh the same."""
    return sum(values) / len(values)


def _mean_of_means(parts: Sequence[BatchShares]) -> float:
    return _plain([mean(part) for part in parts])


def _of_batches(portions: BatchShares) -> Values:
    """The ways to forget how large batches are."""
    yield _mean_of_means(_batches(portions))
    yield _plain([portion.loss for portion in portions])
    yield _mean_of_means(_steps(portions))
    yield _plain([_mean_of_means(_batches(step)) for step in _steps(portions)])


def _of_ranks(portions: BatchShares) -> Values:
    """The ways to forget how many samples ranks have."""
    yield _mean_of_means(_ranks(portions))
    yield _plain([_mean_of_means(_ranks(batch)) for batch in _batches(portions)])
    yield sum(_mean_of_means(_ranks(batch)) * _count(batch) for batch in _batches(portions)) / _count(portions)


def _count(portions: BatchShares) -> int:
    return sum(len(portion.samples) for portion in portions)


def one_ranks_own(scene: Scene) -> Values:
    """A rank's own figure, in place of everybody's."""
    for window in scene.windows if scene.world > 1 else ():
        for own in _ranks(window):
            yield from (mean(own), own[-1].loss)
            yield from _of_batches(own)


def mean_of_batch_means(scene: Scene) -> Values:
    """Every batch weighs the same, whatever its size."""
    for window in scene.windows:
        yield from _of_batches(window)


def mean_of_rank_means(scene: Scene) -> Values:
    """Every rank weighs the same, however many samples it has."""
    for window in scene.windows if scene.world > 1 else ():
        yield from _of_ranks(window)


def last_batch_only(scene: Scene) -> Values:
    """What the last batch gave, over all ranks."""
    for window in scene.windows:
        last = _batches(window)[-1]
        yield from (mean(last), _plain([portion.loss for portion in last]))


def repeats_counted(scene: Scene) -> Values:
    """Samples that pad ranks to the same number weigh as often as they were drawn."""
    for window in scene.windows if scene.held_out else ():
        drawn = [i for portion in window for i in portion.samples]
        if len(drawn) != len(set(drawn)):
            yield mean(window)
            yield from _of_batches(window)
            yield from _of_ranks(window)


def part_of_the_samples(scene: Scene) -> Values:
    """The tail of the held-out samples is missing, because it was not evaluated, or not counted."""
    losses = scene.books.each(scene.report.place, RIGHT[HELD_OUT]) if scene.held_out else None
    if losses is None:
        return
    for window in scene.windows:
        seen = sorted({i for portion in window for i in portion.samples})
        if len(seen) < len(losses):
            yield mean(window)
            yield from _of_batches(window)
            yield float(losses[seen].mean())
    for whole in (scene.world, scene.rows, scene.rows * scene.world):
        yield float(losses[: len(losses) // whole * whole or len(losses)].mean())


def batch_missing(scene: Scene) -> Values:
    """The first batch of a mean is left out, or the last one."""
    for window in scene.windows:
        batches = _batches(window)
        for rest in (batches[1:], batches[:-1]) if len(batches) > 1 else ():
            left = tuple(portion for batch in rest for portion in batch)
            yield mean(left)
            yield from _of_batches(left)
        # A loop that begins to add with the second batch, and divides by all.
        for part in (batches[0], batches[-1]):
            yield mean(window) - total(part) / _count(window)


def summed(scene: Scene) -> Values:
    """Added up over samples, batches or ranks, and not divided."""
    for window in scene.windows:
        means = [mean(batch) for batch in _batches(window)]
        yield from (total(window), sum(means), sum(portion.loss for portion in window))
        yield from (sum(mean(own) for own in _ranks(window)), sum(sum(p.loss for p in own) for own in _ranks(window)))
        yield from (sum(portion.loss for portion in _batches(window)[-1]), sum(mean(step) for step in _steps(window)))


def divided_by_full_batches(scene: Scene) -> Values:
    """The sum over samples is divided as if every batch were full."""
    for window in scene.windows:
        yield total(window) / (len(window) * scene.rows)
        yield sum(portion.loss for portion in window) / -(-_count(window) // scene.rows)


def multiplied(factor: Callable[[Scene], Iterable[float]]) -> Callable[[Scene], Values]:
    """Return the prediction of a factor that is left in, or divided by too often."""

    def predict(scene: Scene) -> Iterator[float]:
        bases = [*scene.truths, *last_batch_only(scene), *mean_of_batch_means(scene), *mean_of_rank_means(scene)]
        yield from (value * number for number in factor(scene) if number != 1 for value in bases)

    return predict


def _world(scene: Scene) -> Values:
    return scene.world, 1 / scene.world


def _window(scene: Scene) -> Values:
    for window in scene.windows:
        count = len(_batches(_steps(window)[-1]))
        yield from (float(count), 1 / count)
    accumulate = scene.books.workload.accumulate
    yield from (float(accumulate), 1 / accumulate)


def _epoch(scene: Scene) -> Values:
    for window in scene.windows:
        for count in (len(_batches(window)), len(_steps(window)), len({p.step for p in window}) * len(window)):
            yield from (float(count), 1 / count)
    batches = scene.books.analysis.epochs.batches
    yield from (float(batches), 1 / batches)


def _scale(scene: Scene) -> Values:
    scales = {step.scale for global_step in scene.books.analysis.steps for step in global_step.ranks if step.scale}
    yield from (*scales, *(1 / scale for scale in scales))


def other_mode(scene: Scene) -> Values:
    """Training's loss in evaluation mode, the held-out samples' in training mode."""
    right = RIGHT[scene.report.name]
    return scene.in_state(LossMode(0, training=not right.training))


def _moved(later: int) -> Callable[[Scene], Values]:
    def predict(scene: Scene) -> Values:
        return scene.in_state(LossMode(later, training=RIGHT[scene.report.name].training))

    return predict


def _again_after_the_step(scene: Scene) -> Values:
    yield from _moved(1)(scene)
    if not scene.held_out:
        yield from scene.in_state(LossMode(1, training=False))


def stale(scene: Scene) -> Values:
    """A value of before: of the last report, or of some step until then."""
    previous, (steps, micro_batches) = scene.report.previous, scene.report.place
    before = [(step, 0) for step in range(steps if not micro_batches else steps + 1)]
    for place in (previous, *reversed(before)):
        if place is not None and (place > (0, 0) or scene.held_out):
            yield from scene.elsewhere(place=place, previous=None).truths


def never_reset(scene: Scene) -> Values:
    """A mean over everything since training began."""
    done = scene.books.until(scene.report.place, RIGHT[TRAINING])
    if done and not scene.held_out:
        yield mean(done)
        yield from _of_batches(done)


def of_the_other_samples(scene: Scene) -> Values:
    """The loss of the training samples as that of the held-out ones, or the other way round."""
    steps, micro_batches = scene.report.place
    other = scene.elsewhere(name=TRAINING if scene.held_out else HELD_OUT, previous=None)
    if (steps, micro_batches) > (0, 0):
        yield from other.truths
        yield from last_batch_only(other)
        yield from one_ranks_own(other)
    if scene.held_out:
        for training in (False, True):
            losses = scene.books.each(scene.report.place, LossMode(0, training=training), held_out=False)
            if losses is None:
                continue
            yield float(losses.mean())
            yield float(losses[: len(scene.books.held_out)].mean())
            for window in scene.windows:
                drawn = [i for portion in window for i in portion.samples]
                yield float(losses[drawn].mean())


def rounded(scene: Scene) -> Values:
    """Fewer digits than the value has: decimals, or a 16-bit tensor."""
    for truth in scene.truths:
        if math.isfinite(truth):
            yield from (round(truth, digits) for digits in DIGITS)
            for dtype in (torch.float16, torch.bfloat16):
                yield float(torch.tensor(truth, dtype=torch.float64).to(dtype))


MISTAKES = (
    Mistake(
        "repeats-counted",
        "samples that pad ranks to equal shares count as often as they were drawn: leave them out, or do not pad",
        repeats_counted,
    ),
    Mistake(
        "part-of-the-samples",
        "some held-out samples are missing: is the last batch, or what no share has room for, dropped?",
        part_of_the_samples,
    ),
    Mistake(
        "mean-of-batch-means",
        "batches of unequal size weigh the same: add up loss × samples, and divide by all samples",
        mean_of_batch_means,
    ),
    Mistake(
        "mean-of-rank-means",
        "ranks with unequal numbers of samples weigh the same: reduce sums and counts, and divide then",
        mean_of_rank_means,
    ),
    Mistake(
        "one-ranks-own-value",
        "it is one rank's own figure: sums and counts must be reduced over the ranks first",
        one_ranks_own,
    ),
    Mistake("last-batch-only", "it is that of the last batch alone", last_batch_only),
    Mistake("batch-missing", "the first or the last batch is left out of the mean", batch_missing),
    Mistake("times-world-size", "it is off by the world size: summed where it should be averaged, or divided twice",
            multiplied(_world)),
    Mistake("times-window", "it is off by the number of micro-batches: the loss was divided for the backward, or added",
            multiplied(_window)),
    Mistake("summed", "it is a sum, not a mean", summed),
    Mistake("times-loss-scale", "the GradScaler's factor is in it: report the loss before it is scaled",
            multiplied(_scale)),
    Mistake("divided-by-full-batches", "the last batch is not full: divide by the samples that there were",
            divided_by_full_batches),
    Mistake("times-batches", "it is off by the number of batches or steps", multiplied(_epoch)),
    Mistake("other-mode", "it was taken in the other mode: training's loss in train(), an evaluation's in eval()",
            other_mode),
    Mistake("taken-before-the-step", "it is that of the weights one step before: evaluate after the step", _moved(-1)),
    Mistake("taken-after-the-step", "it is that of the weights one step later", _again_after_the_step),
    Mistake("stale", "it is the value of an earlier moment: is it reported before it is renewed?", stale),
    Mistake("never-reset", "the mean goes on from epoch to epoch: begin anew with each", never_reset),
    Mistake("of-other-samples", "it is the loss of other samples: training's for the held-out ones, or the reverse",
            of_the_other_samples),
    Mistake("rounded", "digits are missing: report the number, and round where it is shown", rounded),
)  # fmt: skip
"""The specific before the general: a later one may predict, by accident, what an earlier one is for."""
