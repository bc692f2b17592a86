"""One wrong value of a reported metric: everything that a hypothesis about it may predict from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plumbline.judge.expected_metrics import HELD_OUT, RIGHT, BatchShares, LossMode, LossTable, ReportedValue, mean
from plumbline.judge.hypothesis import Hypothesis

Values = Iterable[float]
"""What a hypothesis about a metric predicts."""


@dataclass(frozen=True)
class MetricCase:
    """A wrong report, and the losses whose mean it should have been."""

    losses: LossTable
    report: ReportedValue

    @cached_property
    def windows(self) -> list[BatchShares]:
        """The shares of batches that the mean may be taken over: one entry per way to choose them."""
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
        each = self.losses.each(self.report.place, state) if self.held_out else None
        return values if each is None else [*values, float(each.mean())]


MetricHypothesis = Hypothesis[MetricCase, float]
"""Predicts values as they would have been reported."""


def _by(shares: BatchShares, key: Callable[..., object]) -> list[BatchShares]:
    """Return the shares in groups with the same key, in order of first appearance."""
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
