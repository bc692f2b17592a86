"""Did the optimizer get the right gradient? For a subject, an oracle computes it from the workload."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from plumbline.core.finding import Finding, RankShares, is_unexplained
from plumbline.core.numbers import x_noise
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import clip_limit_of, factor_between, fit_weights, flat, scaled, weighted
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase, Pattern
from plumbline.judge.causes.stage_pattern import StagePattern, ranks_in_words, stage_pattern
from plumbline.judge.findings import TwoWayComparison, Vacuous, failed, with_error_grid
from plumbline.judge.hypothesis import Match
from plumbline.judge.oracle.noise import TOGETHER, Deviation, distance, error_along, in_noise, length, norm
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.trace_analysis import ExpectedGradients, GlobalStep, TraceAnalysis
from plumbline.judge.truth import GradientEvidence, Truth

PROMISE = "what the backend promises for these samples"


def gradients(analysis: TraceAnalysis) -> Finding:
    """Judge the gradients of a subject, whose workload is known."""
    return OracleTruth(analysis).judge()


class OracleTruth(Truth[OracleGradientCase]):
    """Each rank's gradient at each step, at the subject's own weights and samples, against ℓ(B) and the contract."""

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.analysis = analysis

    @cached_property
    def cases(self) -> Sequence[OracleGradientCase]:
        different = self.analysis.different_gradients
        return [OracleGradientCase(self.analysis, global_step.index, rank) for global_step, rank, _ in different]

    def compare(self) -> Finding:
        if not self.analysis.steps_taken:
            raise Vacuous("no optimizer step was taken on all ranks")
        _refuse_vacuous(self.analysis)
        finding = compare_gradients(self.analysis)
        if finding.outcome is Outcome.FAILED or (undue := _undue_gradient(self.analysis)) is None:
            return finding
        return replace(undue, error_grid=finding.error_grid)

    def place(self, finding: Finding, wrong: Sequence[OracleGradientCase]) -> Finding:
        if not wrong:
            return _slightly_scaled(finding, self.cases)
        first = self._accused(wrong)[0]
        right = first.expected.contract
        parameter = max(first.expected.units, key=lambda name: first.error_of(name, right), default=None)
        rank = self.analysis.holder(first.rank, parameter)
        names = [name for name in first.expected.units if self.analysis.holder(first.rank, name) == rank]
        finding = replace(
            finding,
            step=first.index,
            rank=rank,
            parameter=parameter,
            parameters=tuple((name, first.least_error(name)) for name in names),
        )
        if not first.is_finite:
            return replace(
                finding,
                cause="not-finite",
                family="amp",
                message=f"gradients at {first.location} are not finite ({parameter}), but the optimizer stepped: "
                "check for infinities on every rank, after the average",
            )
        if not first.is_predictable:
            return finding
        return replace(finding, rank_shares=rank_shares(self.analysis.steps[first.index], self.analysis))

    def evidence(self, wrong: Sequence[OracleGradientCase]) -> _OracleEvidence | None:
        if not any(one.is_predictable for one in wrong):
            return None
        every = [one for one in self.cases if one.is_predictable]
        return _OracleEvidence.of([one for one in self._accused(wrong) if one.is_finite], every)

    def conclude(self, finding: Finding, wrong: Sequence[OracleGradientCase]) -> Finding:
        if not is_unexplained(finding):
            return finding
        return replace(
            finding, message=f"{finding.message}; no known mistake explains it: {_figures(self._accused(wrong)[0])}"
        )

    def _accused(self, wrong: Sequence[OracleGradientCase]) -> Sequence[OracleGradientCase]:
        """Return the wrong gradients that can be predicted, all if none can.

        If ranks hold different weights, or weights that are not finite, no common gradient can be predicted.
        """
        return [one for one in wrong if one.is_predictable] or wrong


@dataclass(frozen=True, eq=False)
class _OracleEvidence(GradientEvidence[OracleGradientCase]):
    """``every`` has the wrong and the right gradients of all steps that can be predicted."""

    every: Sequence[OracleGradientCase] = ()

    @classmethod
    def of(cls, wrong: Sequence[OracleGradientCase], every: Sequence[OracleGradientCase]) -> _OracleEvidence:
        pattern = _pattern(wrong, every)
        accused = [replace(one, pattern=pattern) for one in wrong]
        judged = [replace(one, pattern=pattern) for one in every]
        right = [one for one in judged if not any(one.step is other.step for other in wrong)]
        return cls(accused, right, judged)

    def occasion(self, refuting: Sequence[OracleGradientCase]) -> str | None:
        return occasion(self.wrong, refuting, self.every)

    def in_noise(self, misfit: float) -> float:
        return misfit

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        here = max((error for _, error in finding.parameters), default=0.0)
        if here <= self.wrong[0].limit:  # wrong only in all parameters together
            here = finding.error_x_noise or 0.0
        errors = f"{x_noise(here)} from the right gradient"
        if match.error is not None:
            errors = f"{x_noise(match.error)} from this prediction; {errors}"
        when = f"; it happens {match.when}" if match.when else ""
        return f"gradients at {self.wrong[0].location} are {description} ({errors}): {hint}{when}"


def compare_gradients(analysis: TraceAnalysis) -> Finding:
    """Return the result of the comparison, without a cause."""
    # One device may take the micro-batches one by one or all samples at once.
    comparison = TwoWayComparison()
    errors: list[Deviation] = []
    for global_step, rank, step in analysis.different_gradients:
        expected = analysis.expected[global_step.index]
        for name, promised in expected.contract.items():
            given = step.gradients.get(name, torch.zeros_like(promised))
            ways = [gradient[name] for gradient in expected.one_device]
            at = Deviation(0.0, global_step.index, name, analysis.holder(rank, name))
            noise = analysis.noise.at(name, expected.units[name])
            off, *others = (distance(given, right) for right in (promised, *ways))
            comparison.add(at, noise, off, others, [distance(way, promised) for way in ways])
            errors.append(replace(at, x_noise=in_noise(min(off, *others), noise)))
        comparison.add(
            Deviation(0.0, global_step.index, TOGETHER, rank),
            analysis.noise.at(TOGETHER, math.hypot(*expected.units.values())),
            error_along(step.gradients, expected.contract),
            [error_along(step.gradients, way) for way in expected.one_device],
        )
    finding = comparison.finding("gradients", "gradients", PROMISE, analysis.allowed(analysis.limit))
    return with_error_grid(finding, errors)


def _undue_gradient(analysis: TraceAnalysis) -> Finding | None:
    """Return the failure if the optimizer got a gradient of a parameter that no loss of the step depends on.

    A gradient of zeros counts if it moves the parameter, as with weight decay, and the parameter is frozen or had no
    gradient so far. Otherwise the zeros may be left from an earlier step.
    """
    for global_step, rank, step in analysis.different_gradients:
        for name in step.gradients:
            if name in analysis.expected[global_step.index].contract:
                continue
            frozen = name not in analysis.oracle.trained
            if norm(step.gradients[name]):
                what = f"of a parameter that is {'frozen' if frozen else 'unused in this step'}"
            elif step.after[name].equal(step.before[name]):
                continue
            elif frozen:
                what = "of zeros and moved a parameter that is frozen"
            elif name not in _used_until(global_step.index, analysis):
                what = "of zeros and moved a parameter that no loss has depended on so far"
            else:
                continue
            finding = failed(
                "gradients",
                f"the optimizer got a gradient {what}",
                cause="frozen-parameter-trained" if frozen else "unused-parameter-moved",
                family="optimizer" if frozen else "unused-params",
                step=global_step.index,
                rank=analysis.holder(rank, name),
                parameter=name,
            )
            return replace(finding, error_x_noise=math.inf)
    return None


def _used_until(index: int, analysis: TraceAnalysis) -> set[str]:
    return {name for step, expected in analysis.expected.items() if step <= index for name in expected.contract}


def _refuse_vacuous(analysis: TraceAnalysis) -> None:
    expected = analysis.expected.values()
    if all(norm(value) == 0 for each in expected for value in each.contract.values()):
        raise Vacuous("every gradient is zero")
    several = [each for each in expected if sum(len(groups) for groups in each.parts) > 1]
    if several and not any(_shares_differ(each, analysis) for each in several):
        raise Vacuous("all shares have the same gradient, so a missing average would not show")


def _shares_differ(expected: ExpectedGradients, analysis: TraceAnalysis) -> bool:
    parts: list[Tensors] = [part for groups in expected.parts for part in groups]
    return any(
        # Numbers that are not finite do not make the check vacuous.
        not distance(part[name], mean) <= analysis.limit * analysis.noise.at(name, expected.units[name])
        for name, mean in expected.raw.items()
        for part in parts
        if name in part
    )


def _slightly_scaled(finding: Finding, cases: Sequence[OracleGradientCase]) -> Finding:
    """Explain gradients that are each right within noise, but all wrong in the same direction."""
    factor = statistics.median(factor_between(one.expected.contract, one.observed) for one in cases)
    before = _factor_before_clipping(cases)
    was = "" if before is None else f"the norm was about {before:.2g} × the right one before clipping"
    clipped = was and f". The 1e-6 that clipping adds shows that {was}"
    return replace(
        finding,
        cause="slightly-scaled" if before is None else "scaled-before-clipping",
        family="loss-normalisation",
        message=f"gradients are {factor:.9g} × the right ones. Rounding could explain the difference in each tensor "
        f"alone, but not in all of them together ({x_noise(finding.error_x_noise or 0.0)}){clipped}: "
        "check what the loss is multiplied by or weighted with",
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


def _pattern(wrong: Sequence[OracleGradientCase], every: Sequence[OracleGradientCase]) -> Pattern:
    return Pattern(
        factor=_common_factor(wrong),
        odd_factor=statistics.median(map(_odd_factor, wrong)),
        clip_limit=statistics.median(clip_limit_of(length(one.observed), length(one.expected.raw)) for one in wrong),
        clip_limits=_common_clip_limits(wrong),
        steps=len({one.index for one in wrong}),
        every_step=len(wrong) == len(every),
        only_scaled=all(map(_is_multiple, wrong)),
        stages=_stages(wrong),
    )


def _is_multiple(case: OracleGradientCase) -> bool:
    multiple = scaled(_common_factor([case]), case.expected.raw)
    return case.world > 1 and case.error(multiple) <= case.limit


def _stages(wrong: Sequence[OracleGradientCase]) -> StagePattern:
    """Return what is wrong on each rank, judged by the parameters that are wrong at the first wrong step."""
    first = wrong[0]
    if not first.in_stages:
        return StagePattern()
    allowed = first.analysis.allowed(first.limit)
    names = [name for name in first.held.holders if first.least_error(name) > allowed]
    return stage_pattern(first.held, names, [(one.expected.raw, one.observed) for one in wrong])


def _common_factor(cases: Sequence[OracleGradientCase]) -> float:
    return statistics.median(factor_between(one.expected.raw, one.observed) for one in cases)


def _odd_factor(case: OracleGradientCase) -> float:
    """Return the factor of the tensor that is furthest from right, relative to the factor of most tensors."""
    multiple = scaled(case.common_factor, case.expected.raw)
    odd = max(multiple, key=lambda name: case.error_of(name, multiple))
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


def _figures(case: OracleGradientCase) -> str:
    names = list(case.expected.contract)
    right, observed = (
        flat(gradient, case.expected.contract, names) for gradient in (case.expected.contract, case.observed)
    )
    cosine = float(torch.nn.functional.cosine_similarity(observed, right, dim=0))
    ratio = norm(observed) / norm(right) if norm(right) else float("inf")
    return f"at {case.location} the gradient has {ratio:.4g} × the right norm, cosine {cosine:.4f}"


MOST_RANKS: Final = 8


def rank_shares(step: GlobalStep, analysis: TraceAnalysis) -> RankShares | None:
    """Return each rank's gradient as a weighted sum of the ranks' own gradients.

    None if that is unknown: one rank or too many, ranks that hold one model together, or gradients that no such sum
    explains within the noise.
    """
    expected = analysis.expected[step.index]
    world = len(step.ranks)
    if analysis.is_staged or not 1 < world <= MOST_RANKS or any(len(parts) != world for parts in expected.parts):
        return None
    own = [mean_gradient([[parts[rank]] for parts in expected.parts]) for rank in range(world)]
    names = list(expected.raw)
    rows = []
    for gradients in (expected.contract, *(one.gradients for one in step.ranks)):
        weights = fit_weights(own, gradients, names) if gradients.keys() == expected.contract.keys() else None
        if weights is None:
            return None
        summed = weighted(own, weights, expected.contract)
        # Units are those of a mean: a sum with larger weights has larger roundings.
        growth = max(1.0, world * max(map(abs, weights)))
        noise = {name: growth * analysis.noise.at(name, unit) for name, unit in expected.units.items()}
        if any(not distance(gradients[name], summed[name]) <= analysis.limit * noise[name] for name in names):
            return None
        rows.append(tuple(round(weight, 4) for weight in weights))
    return RankShares(step.index, rows[0], tuple(rows[1:]))


def _evaluated(case: OracleGradientCase) -> bool:
    return any(step == case.index and micro_batches for step, micro_batches in case.counterfactuals.evaluations())


def _after_an_evaluation(case: OracleGradientCase) -> bool:
    begin = case.index - _place_in_epoch(case)
    return any((begin, 0) < place < (case.index + 1, 0) for place in case.counterfactuals.evaluations())


def _place_in_epoch(case: OracleGradientCase) -> int:
    return case.index % case.analysis.epochs.windows


OCCASIONS: dict[str, Callable[[OracleGradientCase], bool]] = {
    "in a step that leaves parameters unused": lambda case: bool(case.unused),
    "in a window in which the model is evaluated": _evaluated,
    "after an evaluation, until the epoch ends": _after_an_evaluation,
    "after the first evaluation": lambda case: any(
        place < (case.index + 1, 0) for place in case.counterfactuals.evaluations()
    ),
    "in a short window": lambda case: case.micro_batches < case.accumulate,
    "in a full window": lambda case: case.micro_batches == case.accumulate > 1,
    "in the first step": lambda case: case.index == 0,
    "in every step but the first": lambda case: case.index > 0,
    "in the first step of an epoch": lambda case: _place_in_epoch(case) == 0,
    "in every step of an epoch but its first": lambda case: _place_in_epoch(case) > 0,
    "in the last step of an epoch": lambda case: _place_in_epoch(case) == case.analysis.epochs.windows - 1,
    "in the first epoch": lambda case: case.index < case.analysis.epochs.windows,
    "from the second epoch on": lambda case: case.index >= case.analysis.epochs.windows,
    "in every second step, starting with the first": lambda case: case.index % 2 == 0,
    "in every second step, starting with the second": lambda case: case.index % 2 == 1,
    "after a skipped step": lambda case: case.index > 0 and case.analysis.steps[case.index - 1].skipped,
}
"""Properties of a step that do not depend on its gradient, in words, the specific before the general."""


def occasion(
    wrong: Sequence[OracleGradientCase], refuting: Sequence[OracleGradientCase], every: Sequence[OracleGradientCase]
) -> str | None:
    """Return in words what holds for every wrong case, and for none that refutes the hypothesis."""
    for words, holds in OCCASIONS.items():
        if all(map(holds, wrong)) and not any(map(holds, refuting)):
            return words
    ranks = {case.rank for case in wrong}
    # A rank has no case at a step where its gradient equals an earlier rank's.
    present = {(case.index, case.rank) for case in every}
    always = all((index, rank) in present for index in {case.index for case in every} for rank in ranks)
    on_ranks = f"on {ranks_in_words(sorted(ranks))} only"
    if always and not ranks & {case.rank for case in refuting}:
        return on_ranks
    steps = {case.index for case in wrong}
    first = min(steps)
    later = [case for case in refuting if case.index >= first]
    if len(steps) > 1 and any(case.rank in ranks for case in later):
        return None
    when = f"at step {first} only" if len(steps) == 1 else f"from step {first} on"
    return f"{when}, {on_ranks}" if any(case.index in steps for case in later) else when
