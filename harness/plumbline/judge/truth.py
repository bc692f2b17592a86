"""Compares received gradients with the right ones, for each source of right gradients.

``oracle``: the workload is known, so one device computes the gradient in float64 (``judge.checks.gradients``).
``replay``: a script's own calls, computed again on each rank (``check.judge.gradients``).
``joint forward``: the forward that all ranks of a script compute together (``check.judge.joint_truth``).
A truth need not store whole gradients. A case only reports how far it is from a prediction, and for that the scalar
products of both with the same directions are enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.hypothesis import OCCASIONAL, Evidence, Hypothesis, Match, explain
from plumbline.judge.mistakes.case import GradientCase

Case = TypeVar("Case", bound=GradientCase)


class Truth(ABC, Generic[Case]):
    """Knows the right gradient of each step of a training."""

    @property
    @abstractmethod
    def cases(self) -> Sequence[Case]:
        """The gradients that can be judged, in the order of the steps."""

    def judge(self) -> Finding:
        """Compare all gradients with the right ones, and explain the wrong ones by the known mistakes."""
        finding = self.compare()
        if finding.outcome is not Outcome.FAILED or finding.cause is not None:
            return finding
        # Some failures show only in all gradients together.
        wrong = [case for case in self.cases if not case.is_right] or list(self.cases)
        finding = self.place(finding, wrong)
        if finding.outcome is not Outcome.FAILED or finding.cause is not None:
            return finding
        evidence = self.evidence(wrong)
        finding = replace(finding, cause=UNEXPLAINED) if evidence is None else explain(finding, evidence)
        return self.conclude(finding, wrong)

    @abstractmethod
    def compare(self) -> Finding:
        """Compare all gradients with the right ones. A failure has no cause yet if a search must find it.

        It raises ``Vacuous`` if wrong gradients would have passed too.
        """

    def place(self, finding: Finding, wrong: Sequence[Case]) -> Finding:
        """Return a failure with the place of the first wrong gradient, and with its cause if no search is needed."""
        return finding

    @abstractmethod
    def evidence(self, wrong: Sequence[Case]) -> GradientEvidence[Case] | None:
        """Return the evidence on which mistakes are tried; None if nothing can be predicted."""

    def conclude(self, finding: Finding, wrong: Sequence[Case]) -> Finding:
        """Return the failure after the search for its cause, completed with other evidence."""
        return finding


@dataclass(frozen=True, eq=False)
class GradientEvidence(Evidence, Generic[Case]):
    """The wrong gradients of a training, and the ``right`` ones that a mistake must not change.

    A mistake must predict every wrong gradient.
    """

    wrong: Sequence[Case]
    right: Sequence[Case] = ()

    @property
    def kind(self) -> type:
        """Mistakes predict from one case at a time."""
        return type(self.wrong[0])

    def match(self, hypothesis: Hypothesis[Any, Any]) -> Match | None:
        """Return how a hypothesis fits all wrong gradients.

        If the mistake has no effect at a step, its prediction is the right gradient. A mistake that happens only at
        some steps needs an occasion: something else that only these steps or ranks have in common. A hypothesis that is
        fitted to the wrong steps must also fit the right ones, because an occasion could be found for anything.
        """
        first = self.wrong[0]
        misfit = _misfit(hypothesis, self.wrong)
        if misfit > first.limit:
            return None
        refuting = [one for one in self.right if _misfit(hypothesis, [one], without=0.0) > one.limit]
        when = self.occasion(refuting) if refuting else ""
        if when is None or (when and hypothesis.specificity < OCCASIONAL):
            return None
        by_elimination = isinstance(next(iter(hypothesis.predict(first)), None), Match)
        return Match(figures=first.figures, error=None if by_elimination else self.in_noise(misfit), when=when)

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        """Return the message of a finding whose mistake is known: descriptions complete the sentence "they are …"."""
        return f"{finding.message}: they are {description}; {hint}"

    def occasion(self, refuting: Sequence[Case]) -> str | None:
        """Return in words what all wrong gradients, but none that refutes a hypothesis, have in common."""
        return None

    def in_noise(self, misfit: float) -> float | None:
        """Return a misfit in multiples of noise; None if it is known only in multiples of a bound."""
        return None


def _misfit(hypothesis: Hypothesis[Any, Any], cases: Sequence[GradientCase], without: float = math.inf) -> float:
    """Return the largest misfit of a case with its nearest prediction; ``without`` for a case without predictions."""
    worst = 0.0
    for case in cases:
        misfits = (misfit for prediction in hypothesis.predict(case) for misfit in case.misfits(prediction))
        worst = max(worst, min(misfits, default=without))
        if worst > case.limit:
            break
    return worst
