"""The wrong values of one metric, from which hypotheses predict and on which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
)
from plumbline.judge.hypothesis import Evidence, Hypothesis, Match, explain

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
