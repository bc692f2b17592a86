"""Hypotheses about causes, their registry, and ``explain``, which finds the hypothesis that fits best.

A hypothesis predicts what a mistake would have left in the evidence. How closely a prediction must fit depends on the
evidence: gradients and reported metrics within noise, learning rates to nine digits. A hypothesis about counts
(samples, steps, evaluations) yields the ``Match`` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.judge.findings import failed_with_hint
from plumbline.judge.trace_analysis import TraceAnalysis

OCCASIONAL = 100
"""The specificity of a hypothesis that fits only on some occasions: above fitted ones, below those that always fit."""

Case_contra = TypeVar("Case_contra", contravariant=True)
Prediction_co = TypeVar("Prediction_co", covariant=True)


@dataclass(frozen=True)
class Match:
    """How a hypothesis fits.

    ``step`` and ``rank`` say where the mistake shows first; None keeps those of the finding. ``figures`` fill the
    placeholders of the hypothesis's texts. ``error`` is the distance between prediction and evidence in × noise, None
    for counts. ``when`` says in words on which occasions the mistake happens; it is empty if it always happens.
    """

    step: int | None = None
    rank: int | None = None
    figures: Mapping[str, object] = field(default_factory=dict)
    error: float | None = None
    when: str = ""


@dataclass(frozen=True)
class Hypothesis(Generic[Case_contra, Prediction_co]):
    """A known mistake, and how to recognise it.

    ``name`` and ``family`` are the cause in the finding. ``predict`` yields each variant of what the mistake would have
    left in the evidence of a case; nothing if the mistake cannot have happened. ``description`` says what was observed
    and ``hint`` what to look at; both can have ``str.format`` placeholders. Of several hypotheses that fit, the one
    with the largest ``specificity`` is the cause; among equals the one registered first. Numbers are compared only
    between hypotheses about the same kind of case. A general hypothesis can fit by accident where a specific one
    applies, so it has a smaller number.
    """

    name: str
    family: str
    predict: Callable[[Case_contra], Iterable[Prediction_co]]
    description: str
    hint: str
    specificity: float


def holds(condition: Callable[[Case_contra], bool]) -> Callable[[Case_contra], Iterator[Match]]:
    """Return a ``predict`` that yields a match, without place and figures, if a condition holds."""

    def predict(case: Case_contra) -> Iterator[Match]:
        if condition(case):
            yield Match()

    return predict


class Evidence(ABC):
    """The evidence on which hypotheses are tried.

    ``kind`` is the type of case from which the hypotheses predict, and the key of their list in the registry.
    """

    @property
    def kind(self) -> type:
        """The type of case that ``predict`` takes."""
        return type(self)

    @abstractmethod
    def match(self, hypothesis: Hypothesis[Any, Any]) -> Match | None:
        """Return how a hypothesis fits; None if the evidence refutes it."""

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        """Return the message of the explained finding."""
        return f"{finding.message}: {description}; {hint}"


class CountedCase(Evidence):
    """Evidence of counts, ids, places and bits: a hypothesis yields the match itself."""

    def match(self, hypothesis: Hypothesis[Any, Match]) -> Match | None:
        return next(iter(hypothesis.predict(self)), None)


@dataclass(frozen=True, eq=False)
class TraceCase(CountedCase):
    """The trace of one launch."""

    analysis: TraceAnalysis


HYPOTHESES: dict[type, list[Hypothesis[Any, Any]]] = {}
"""The hypotheses about each kind of case, in any order: their specificities decide which is tried first.

``plumbline.judge.causes`` registers ours.
"""


def register(kind: type, *hypotheses: Hypothesis[Any, Any]) -> None:
    """Add hypotheses about a kind of case, which may be new.

    It raises ``TypeError`` if the kind of case is left out, or there is no hypothesis.
    """
    if not isinstance(kind, type) or not hypotheses or not all(isinstance(one, Hypothesis) for one in hypotheses):
        raise TypeError(
            "register() takes a kind of case and then one or more hypotheses: register(GradientCase, Hypothesis(…))"
        )
    HYPOTHESES.setdefault(kind, []).extend(hypotheses)


def explain(finding: Finding, evidence: Evidence) -> Finding:
    """Return the finding with the cause that the most specific fitting hypothesis names, else ``unexplained``.

    Hypotheses about the evidence's kind of case are tried, and those about its base classes.
    """
    best = most_specific([one for each in evidence.kind.__mro__ for one in HYPOTHESES.get(each, ())], evidence)
    if best is None:
        return replace(finding, cause=UNEXPLAINED)
    hypothesis, match = best
    description, hint = (text.format(**match.figures) for text in (hypothesis.description, hypothesis.hint))
    return replace(
        finding,
        cause=hypothesis.name,
        family=hypothesis.family,
        message=evidence.message(finding, description, hint, match),
        step=finding.step if match.step is None else match.step,
        rank=finding.rank if match.rank is None else match.rank,
        hint=hint,
        cause_x_noise=match.error,
    )


def most_specific(
    hypotheses: Iterable[Hypothesis[Any, Any]], evidence: Evidence
) -> tuple[Hypothesis[Any, Any], Match] | None:
    best: tuple[Hypothesis[Any, Any], Match] | None = None
    for hypothesis in sorted(hypotheses, key=lambda one: -one.specificity):
        if best is not None and hypothesis.specificity <= OCCASIONAL:
            break
        match = evidence.match(hypothesis)
        if match is not None and not match.when:
            return hypothesis, match
        if match is not None and best is None:
            best = hypothesis, match
    return best


def failed_by(check: str, observed: str, mistake: Hypothesis[Any, Any], **place: Any) -> Finding:
    """Return the failure of a check that observed a known mistake directly, without any prediction."""
    finding = failed_with_hint(check, observed, mistake.hint, cause=mistake.name, family=mistake.family, **place)
    return replace(finding, hint=mistake.hint)
