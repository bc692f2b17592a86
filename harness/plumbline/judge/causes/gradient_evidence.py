"""Tries hypotheses on wrong gradients: a hypothesis must predict the gradient of every step and rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from plumbline.core.finding import UNEXPLAINED, Finding
from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import clip_limit_of, factor_between, fit_weights, flat, scaled
from plumbline.judge.causes.counterfactuals import Counterfactuals
from plumbline.judge.causes.gradient_case import GradientHypothesis, OracleGradientCase, Pattern
from plumbline.judge.causes.occasions import occasion
from plumbline.judge.causes.rank_shares import rank_shares
from plumbline.judge.causes.registry import explain
from plumbline.judge.causes.stage_pattern import StagePattern, stage_pattern
from plumbline.judge.findings import times
from plumbline.judge.hypothesis import OCCASIONAL, Evidence, Match
from plumbline.judge.mistakes.case import GradientMistake
from plumbline.judge.mistakes.combination import Combination, SomeParameters
from plumbline.judge.oracle.noise import distance, length, norm
from plumbline.judge.trace_analysis import TraceAnalysis, same


@dataclass(frozen=True, eq=False)
class GradientEvidence(Evidence):
    """The gradients of a trace: the ``wrong`` ones, the ``right`` ones, and all that can be predicted (``every``)."""

    wrong: Sequence[OracleGradientCase]
    right: Sequence[OracleGradientCase]
    every: Sequence[OracleGradientCase]
    analysis: TraceAnalysis

    @classmethod
    def of(
        cls, wrong: Sequence[OracleGradientCase], every: Sequence[OracleGradientCase], analysis: TraceAnalysis
    ) -> GradientEvidence:
        """Return the evidence, each case with the pattern of all wrong gradients."""
        pattern = Pattern(
            factor=_common_factor(wrong),
            odd_factor=statistics.median(_odd_factor(one, analysis) for one in wrong),
            clip_limit=statistics.median(
                clip_limit_of(length(one.observed), length(one.expected.raw)) for one in wrong
            ),
            clip_limits=_common_clip_limits(wrong),
            steps=len({one.index for one in wrong}),
            every_step=len(wrong) == len(every),
            only_scaled=all(_is_multiple(one, analysis) for one in wrong),
            stages=_stages(wrong, analysis),
        )
        accused = [replace(one, pattern=pattern) for one in wrong]
        judged = [replace(one, pattern=pattern) for one in every]
        right = [one for one in judged if not any(one.step is other.step for other in wrong)]
        return cls(accused, right, judged, analysis)

    @property
    def kind(self) -> type:
        return OracleGradientCase

    def match(self, hypothesis: GradientHypothesis | GradientMistake) -> Match | None:
        """Return how a hypothesis fits all wrong gradients.

        If the mistake has no effect at a step, its prediction is the right gradient. A mistake that happens only at
        some steps needs an occasion: something else that only these steps or ranks have in common. A hypothesis that is
        fitted to the wrong steps must also fit the right ones, because an occasion could be found for anything.
        """
        limit = self.analysis.limit
        error = _misfit(hypothesis, self.wrong, self.analysis)
        if error > limit:
            return None
        refuting = [one for one in self.right if _misfit(hypothesis, [one], self.analysis, without=0.0) > limit]
        when = occasion(self.wrong, refuting, self.every) if refuting else ""
        if when is None or (when and hypothesis.specificity < OCCASIONAL):
            return None
        by_elimination = isinstance(next(iter(hypothesis.predict(self.wrong[0])), None), Match)
        return Match(figures=self.wrong[0].figures, error=None if by_elimination else error, when=when)

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        """Return where the gradients are wrong, by how much, and how near the hypothesis comes."""
        errors = f"{times(finding.error_x_noise or 0.0)} from right"
        if match.error is not None:
            errors = f"{times(match.error)} from that; {errors}"
        when = f"; it happens {match.when}" if match.when else ""
        return f"gradients at {self.wrong[0].location} are {description} ({errors}): {hint}{when}"


def explain_gradients(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return the finding with the cause of the wrong gradient, pointing to the first step at which it is wrong."""
    cases = _cases(analysis)
    wrong = [one for one in cases if not _is_right(one, analysis)]
    if not wrong:
        return _slightly_scaled(finding, cases)
    # If ranks hold different weights, or weights that are not finite, no common gradient can be predicted.
    predictable = [one for one in cases if _is_predictable(one)]
    wrong = [one for one in wrong if one in predictable] or wrong
    first = wrong[0]
    parameter = _worst_parameter(first, analysis)
    rank = analysis.holder(first.rank, parameter)
    finding = replace(
        finding,
        step=first.index,
        rank=rank,
        parameter=parameter,
        parameters=tuple(
            (name, _least_error(first, name, analysis))
            for name in first.expected.units
            if analysis.holder(first.rank, name) == rank
        ),
    )
    if not first.is_finite:
        return replace(
            finding,
            cause="not-finite",
            family="amp",
            message=f"gradients at {first.location} are not finite ({finding.parameter}), but the optimizer stepped: "
            "check for infinities on every rank, after the average",
        )
    if first in predictable:
        finding = replace(finding, rank_shares=rank_shares(analysis.steps[first.index], analysis))
        evidence = GradientEvidence.of([one for one in wrong if one.is_finite], predictable, analysis)
        explained = explain(finding, evidence)
        if explained.cause != UNEXPLAINED:
            return explained
    return replace(finding, cause=UNEXPLAINED, message=f"{finding.message}; unexplained: {_figures(first)}")


def _cases(analysis: TraceAnalysis) -> list[OracleGradientCase]:
    counterfactuals = Counterfactuals(analysis)
    different = analysis.differing_ranks("gradients")
    return [OracleGradientCase.of(counterfactuals, global_step.index, rank) for global_step, rank, _ in different]


def _slightly_scaled(finding: Finding, cases: Sequence[OracleGradientCase]) -> Finding:
    """Explain gradients that are each right within noise, but all wrong in the same direction."""
    factor = statistics.median(factor_between(one.expected.contract, one.observed) for one in cases)
    before = _factor_before_clipping(cases)
    return replace(
        finding,
        cause="slightly-scaled" if before is None else "scaled-before-clipping",
        family="loss-normalisation",
        message=f"gradients are {factor:.9g} × the right ones: rounding could explain the difference in each tensor "
        f"alone, but not in all of them together ({times(finding.error_x_noise or 0.0)}): "
        + ("" if before is None else f"their norm was about {before:.2g} × as large before clipping added 1e-6 to it: ")
        + "check what the loss is multiplied by or weighted with",
    )


def _factor_before_clipping(cases: Sequence[OracleGradientCase]) -> float | None:
    """Return how much longer gradients were before they were clipped to nearly the right length.

    ``clip_grad_norm_`` divides by the norm plus 1e-6, so shorter gradients end a little shorter. None if they are not
    shorter, or not clipped.
    """
    factors = []
    for one in cases:
        limit, observed, raw = one.clip_norm or 0.0, length(one.observed), length(one.expected.raw)
        if raw > limit > observed > 0:
            factors.append(1e-6 * observed / (limit - observed) / raw)
    return statistics.median(factors) if factors else None


def _is_predictable(case: OracleGradientCase) -> bool:
    weights = case.ranks[0].before
    together = case.counterfactuals.analysis.recorded_together(case.index, case.rank).values()
    return (
        all(same(step.before, weights) for step in case.ranks[1:])
        and all(same(member.before, {name: case.step.before[name] for name in member.before}) for member in together)
        and all(bool(value.isfinite().all()) for value in weights.values())
    )


def _is_right(case: OracleGradientCase, analysis: TraceAnalysis) -> bool:
    limit = 0.0 if analysis.exact else analysis.limit
    return any(_error(case, right, analysis) <= limit for right in (case.expected.contract, *case.expected.one_device))


def _is_multiple(case: OracleGradientCase, analysis: TraceAnalysis) -> bool:
    multiple = scaled(_common_factor([case]), case.expected.raw)
    return case.world > 1 and _error(case, multiple, analysis) <= analysis.limit


def _stages(wrong: Sequence[OracleGradientCase], analysis: TraceAnalysis) -> StagePattern:
    """Return what is wrong on each rank, judged by the parameters that are wrong at the first wrong step."""
    first = wrong[0]
    if not first.in_stages:
        return StagePattern()
    limit = 0.0 if analysis.exact else analysis.limit
    names = [name for name in first.held.holders if _least_error(first, name, analysis) > limit]
    return stage_pattern(first.held, names, [(one.expected.raw, one.observed) for one in wrong])


def _common_factor(cases: Sequence[OracleGradientCase]) -> float:
    return statistics.median(factor_between(one.expected.raw, one.observed) for one in cases)


def _odd_factor(case: OracleGradientCase, analysis: TraceAnalysis) -> float:
    """Return the factor of the tensor that is furthest from right, relative to the factor of most tensors."""
    multiple = scaled(case.common_factor, case.expected.raw)
    odd = max(multiple, key=lambda name: _error_of(case, name, multiple, analysis))
    return factor_between({odd: multiple[odd]}, case.observed)


def _common_clip_limits(cases: Sequence[OracleGradientCase]) -> tuple[float, ...]:
    """Return the median norm to which each rank's share would have to be clipped; empty if it is unknown."""
    limits = []
    for one in cases:
        parts = one.expected.parts[0]
        weights = fit_weights(parts, one.observed, list(one.observed))
        if one.micro_batches > 1 or weights is None or len(parts) != one.world:
            return ()
        lengths = [length(part) for part in parts]
        limits.append([clip_limit_of(w * own * len(parts), own) for w, own in zip(weights, lengths, strict=True)])
    return tuple(map(statistics.median, zip(*limits, strict=True)))


def _misfit(
    hypothesis: GradientHypothesis | GradientMistake,
    cases: Sequence[OracleGradientCase],
    analysis: TraceAnalysis,
    without: float = math.inf,
) -> float:
    """Return the largest error over cases, each with its nearest prediction; ``without`` where there is none."""
    worst = 0.0
    for case in cases:
        errors = (
            _misfit_of(one, case, analysis)
            for prediction in hypothesis.predict(case)
            for one in _in_tensors(prediction, case)
        )
        worst = max(worst, min(errors, default=without))
        if worst > analysis.limit:
            break
    return worst


def _in_tensors(
    prediction: Combination | SomeParameters | Tensors | Match, case: OracleGradientCase
) -> Iterable[Tensors | Match]:
    return case.predicted(prediction) if isinstance(prediction, Combination | SomeParameters) else (prediction,)


def _misfit_of(prediction: Tensors | Match, case: OracleGradientCase, analysis: TraceAnalysis) -> float:
    """Return the error of a prediction: 0 by elimination, infinite if it repeats the evidence."""
    if isinstance(prediction, Match):
        return 0.0
    if any(prediction.get(name) is value for name, value in case.observed.items()):
        return math.inf
    return _error(case, prediction, analysis)


def _error(case: OracleGradientCase, predicted: Tensors, analysis: TraceAnalysis) -> float:
    """Return the largest error of any tensor, in × noise."""
    return max((_error_of(case, name, predicted, analysis) for name in case.expected.units), default=0.0)


def _error_of(case: OracleGradientCase, name: str, predicted: Tensors, analysis: TraceAnalysis) -> float:
    """Return the error of one tensor, in × noise; a larger prediction has more noise."""
    right = case.expected.contract[name]
    expected = predicted.get(name, torch.zeros_like(right))
    size = norm(right)
    growth = max(1.0, norm(expected) / size) if size else 1.0
    noise = analysis.noise.at(name, case.expected.units[name]) * growth
    error = distance(case.observed[name], expected)
    return error / noise if noise else (float("inf") if error else 0.0)


def _least_error(case: OracleGradientCase, name: str, analysis: TraceAnalysis) -> float:
    """Return the distance of a tensor from the nearest right one, in × noise."""
    rights = (case.expected.contract, *case.expected.one_device)
    return min(_error_of(case, name, right, analysis) for right in rights)


def _worst_parameter(case: OracleGradientCase, analysis: TraceAnalysis) -> str | None:
    return max(
        case.expected.units,
        key=lambda name: _error_of(case, name, case.expected.contract, analysis),
        default=None,
    )


def _figures(case: OracleGradientCase) -> str:
    """Describe the wrong gradient relative to the right one by its length and direction."""
    names = list(case.expected.contract)
    right, observed = (
        flat(gradient, case.expected.contract, names) for gradient in (case.expected.contract, case.observed)
    )
    cosine = float(torch.nn.functional.cosine_similarity(observed, right, dim=0))
    ratio = norm(observed) / norm(right) if norm(right) else float("inf")
    return f"at {case.location} it is {ratio:.4g} × as long as the right one, cosine {cosine:.4f}"
