"""Compares received gradients with the right ones, for each source of right gradients, and predicts wrong ones.

``oracle``: the workload is known, so one device computes the gradient in float64 (``judge.checks.gradients``).
``replay``: a script's own calls, computed again on each rank (``check.judge.gradients``).
``joint forward``: the forward that all ranks of a script compute together (``check.judge.joint_truth``).
A truth need not store whole gradients. A case only reports how far it is from a prediction, and for that the scalar
products of both with the same directions are enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.core.numbers import scale_text
from plumbline.core.outcome import Outcome
from plumbline.judge.hypothesis import OCCASIONAL, Evidence, Hypothesis, Match, explain

Weight = Callable[[int, int, int], float]
"""The weight of a share, from its rank, its micro-batch and the rank's number of micro-batches.

A share is what a micro-batch of a rank adds to the right gradient, so a weight of 1 everywhere is right.
"""


@dataclass(frozen=True, eq=False)
class Combination:
    """A sum of shares with weights.

    Attributes:
        weight: the weights of this step's shares.
        earlier: the weights of the previous step's shares; None if these do not count.
        left_over: the factor with which the gradient that the optimizer received one step before is added.
    """

    weight: Weight
    earlier: Weight | None = None
    left_over: float = 0.0


@dataclass(frozen=True, eq=False)
class SomeParameters:
    """The right gradient for some parameters, and a combination for the others."""

    combination: Combination


def even(factor: float) -> Weight:
    """Give every share the same weight; a weight of 1 is right."""
    return lambda rank, place, count: factor


def scaled(factor: float) -> Combination:
    """Return the right gradient times a factor."""
    return Combination(even(factor))


RIGHT = scaled(1.0)
"""Every share with the weight 1."""


class GradientCase(ABC):
    """One rank at one step, for any source of the right gradient.

    A misfit is the distance of the received gradient from a prediction, in multiples of what rounding explains.
    """

    index: int
    """The step, counted from 0."""

    rank: int

    @property
    @abstractmethod
    def world(self) -> int:
        """The number of ranks whose gradients are averaged."""

    @property
    @abstractmethod
    def micro_batches(self) -> int:
        """The number of micro-batches of this step."""

    @property
    @abstractmethod
    def accumulate(self) -> int:
        """The number of micro-batches of a full window."""

    @property
    @abstractmethod
    def scales(self) -> Sequence[float | None]:
        """The loss scale of each rank; None or 1 without one."""

    @property
    @abstractmethod
    def has_shares(self) -> Sequence[bool]:
        """For each rank, whether it has a share in every micro-batch."""

    @property
    @abstractmethod
    def has_earlier_step(self) -> bool:
        """Whether the previous step's right gradient, and the one that the optimizer received, are known."""

    @property
    @abstractmethod
    def zeros(self) -> Sequence[bool]:
        """For each parameter, whether the optimizer received a gradient of exact zeros, or none."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """The number by which the right gradients come nearest to the wrong ones, at all steps."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """The largest misfit that rounding explains."""

    @abstractmethod
    def misfits(self, prediction: Any) -> Iterator[float]:
        """Yield the misfit of each form that a prediction can take; nothing if it has no effect."""

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the distance from the right gradient."""
        return any(misfit <= self.limit for misfit in self.misfits(RIGHT))

    @property
    def location(self) -> str:
        return f"step {self.index}" + (f" on rank {self.rank}" if self.world > 1 else "")

    @property
    def figures(self) -> Mapping[str, object]:
        """The values for the placeholders in a mistake's texts."""
        return {
            "world": self.world,
            "micro_batches": self.micro_batches,
            "accumulate": self.accumulate,
            "rank": self.rank,
            "scale": scale_text(self.scale or 1.0),
            "factor": f"{self.factor:.4g}",
        }

    @property
    def scale(self) -> float | None:
        """The loss scale of this rank, None without one."""
        own = self.scales[self.rank] if self.rank < len(self.scales) else None
        return None if own == 1.0 else own


Predictions = Iterator[Combination | SomeParameters | Match]
"""The variants of what a mistake can make of the right gradient."""

GradientMistake = Hypothesis[GradientCase, Combination | SomeParameters | Match]
"""A mistake that is known by how it combines the shares of ranks and micro-batches."""


def multiplied(factors: Callable[[GradientCase], Iterable[float]]) -> Callable[[GradientCase], Predictions]:
    """Return the prediction of the right gradient times each factor."""

    def predict(case: GradientCase) -> Predictions:
        yield from map(scaled, factors(case))

    return predict


def in_some_parameters(predict: Callable[[GradientCase], Predictions]) -> Callable[[GradientCase], Predictions]:
    """Return the prediction of a mistake in some parameters, while the others are right."""

    def predict_in_some(case: GradientCase) -> Predictions:
        yield from (SomeParameters(one) for one in predict(case) if isinstance(one, Combination))

    return predict_in_some


def several(count: int) -> list[float]:
    """Return the number as a factor, nothing if it is not more than 1."""
    return [float(count)] if count > 1 else []


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
