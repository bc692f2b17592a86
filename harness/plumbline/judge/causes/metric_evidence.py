"""Tries hypotheses on wrong metrics: a hypothesis must predict every wrong value of one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.judge.causes.metric_case import MetricCase, MetricHypothesis
from plumbline.judge.expected_metrics import TRAINING, LossTable, ReportedValue
from plumbline.judge.hypothesis import Evidence, Match, explain


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
