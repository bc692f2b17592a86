"""Finds the explanation of a wrong gradient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.core.finding import UNEXPLAINED, Finding
from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import (
    Counterfactuals,
    Explanation,
    Scene,
    fit_weights,
    flat,
    length,
    limit_of,
    scaled,
)
from harness.judge.causes.mistakes import CONCLUSIONS, PREDICTIONS
from harness.judge.causes.occasions import occasion
from harness.judge.findings import times
from harness.judge.oracle.noise import distance, norm
from harness.judge.trace_analysis import TraceAnalysis, same


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return the finding with the cause of the wrong gradient, pointing to the first step at which it is wrong.

    An explanation has to predict the gradient of every step and rank, the right ones too: where a mistake has no
    effect its prediction is what is right. One that happens only now and then needs an occasion: something else in the
    evidence that tells the steps, or the ranks, at which it happens from the others. What no explanation predicts
    throughout stays unexplained. Of several that do, the specific comes before the general.
    """
    scenes = _scenes(analysis)
    wrong = [scene for scene in scenes if not _is_right(scene, analysis)]
    if not wrong:
        return _together(finding, scenes)
    # Once ranks hold different weights, or none that are numbers, there is no common gradient to predict.
    judgeable = [scene for scene in scenes if _is_judgeable(scene)]
    wrong = [scene for scene in wrong if scene in judgeable] or wrong
    first = wrong[0]
    here = replace(
        finding,
        step=first.index,
        rank=first.rank,
        parameter=_worst_parameter(first, analysis),
        parameters=tuple((name, _least_error(first, name, analysis)) for name in first.truth.units),
    )
    if not _is_finite(first):
        return replace(
            here,
            cause="not-finite",
            family="amp",
            message=f"gradients at {first.place} are not finite ({here.parameter}), and the step was taken all the "
            "same: were infinities looked for, after the average, on every rank?",
        )
    if first in judgeable:
        wrong = [scene for scene in wrong if _is_finite(scene)]
        always = len(wrong) == len(judgeable)
        factor, limit, limits = _common_factor(wrong), _common_limit(wrong), _common_limits(wrong)
        evenly = all(_is_multiple(scene, analysis) for scene in wrong)
        wrong, every = (
            [
                replace(scene, factor=factor, limit=limit, limits=limits, always_wrong=always, evenly=evenly)
                for scene in chosen
            ]
            for chosen in (wrong, judgeable)
        )
        for explanation, error, when in _fitting(wrong, every, analysis):
            return replace(
                here,
                cause=explanation.name,
                family=explanation.family,
                message=(
                    f"gradients at {first.place} are {_fill(explanation.saw, wrong[0])} ({times(error)} from that; "
                    f"{times(finding.error_x_noise or 0.0)} from right): {explanation.look}"
                    f"{f'; it happens {when}' if when else ''}"
                ),
            )
    return replace(here, cause=UNEXPLAINED, message=f"{finding.message}; unexplained: {_figures(first)}")


def _together(finding: Finding, scenes: list[Scene]) -> Finding:
    """Explain a gradient of which no tensor is wrong by itself, but all of them in the same direction."""
    factor = _common_factor(scenes)
    return replace(
        finding,
        cause="slightly-scaled",
        family="loss-normalisation",
        message=f"gradients are {factor:.4f} × the right ones: in no tensor it is more than rounding explains, in "
        f"all of them together it is ({times(finding.error_x_noise or 0.0)}): what multiplies the loss, or weighs it?",
    )


def _fitting(
    wrong: list[Scene], every: list[Scene], analysis: TraceAnalysis
) -> Iterator[tuple[Explanation, float, str]]:
    """Yield the explanations that fit, each with its error in × noise, and when it happens if that is not always.

    Predictions come before conclusions, which are fitted to the evidence or drawn by elimination; these have to hold
    always, because an occasion could be found for anything that was fitted to the wrong steps alone.
    """
    right = [scene for scene in every if not any(scene.step is other.step for other in wrong)]
    now_and_then = []
    for explanation in PREDICTIONS:
        error = _misfit(explanation, wrong, analysis)
        if error > analysis.limit:
            continue
        refuting = [one for one in right if _misfit(explanation, [one], analysis, silent=0.0) > analysis.limit]
        if not refuting:
            yield explanation, error, ""
        elif (when := occasion(wrong, refuting, every)) is not None:
            now_and_then.append((explanation, error, when))
    yield from now_and_then
    for explanation in CONCLUSIONS:
        error = _misfit(explanation, wrong, analysis)
        if error <= analysis.limit and _misfit(explanation, right, analysis, silent=0.0) <= analysis.limit:
            yield explanation, error, ""


def _scenes(analysis: TraceAnalysis) -> list[Scene]:
    laboratory = Counterfactuals(analysis)
    scenes = []
    for global_step, rank, step in analysis.differing_ranks("gradients"):
        earlier = analysis.steps[global_step.index - 1].ranks[rank] if global_step.index else None
        scenes.append(
            Scene(
                index=global_step.index,
                rank=rank,
                step=step,
                ranks=global_step.ranks,
                truth=analysis.expected[global_step.index],
                accumulate=analysis.workload.accumulate,
                clip_norm=analysis.workload.clip_norm,
                trained=frozenset(analysis.oracle.trained),
                earlier=earlier.gradients if earlier else None,
                past=tuple(truth for index, truth in reversed(analysis.expected.items()) if index < global_step.index),
                factor=1.0,
                limit=0.0,
                limits=(),
                always_wrong=False,
                evenly=False,
                laboratory=laboratory,
            )
        )
    return scenes


def _is_finite(scene: Scene) -> bool:
    return all(bool(value.isfinite().all()) for value in scene.given.values())


def _is_judgeable(scene: Scene) -> bool:
    weights = scene.ranks[0].before
    return all(same(step.before, weights) for step in scene.ranks[1:]) and all(
        bool(value.isfinite().all()) for value in weights.values()
    )


def _is_right(scene: Scene, analysis: TraceAnalysis) -> bool:
    limit = 0.0 if analysis.exact else analysis.limit
    return any(_error(scene, truth, analysis) <= limit for truth in (scene.truth.contract, *scene.truth.one_device))


def _is_multiple(scene: Scene, analysis: TraceAnalysis) -> bool:
    """Say whether several ranks were handed the right gradient times some number."""
    multiple = scaled(_common_factor([scene]), scene.truth.raw)
    return scene.world > 1 and _error(scene, multiple, analysis) <= analysis.limit


def _common_factor(scenes: list[Scene]) -> float:
    """Return the median of the scenes' own factors: the one number, if there is one for all of them."""
    factors = []
    for scene in scenes:
        names = list(scene.truth.raw)
        right, given = (flat(gradient, scene.truth.raw, names) for gradient in (scene.truth.raw, scene.given))
        factors.append(float(given @ right / (right @ right)) if norm(right) else 1.0)
    return statistics.median(factors)


def _common_limit(scenes: list[Scene]) -> float:
    """Return the median of the norms to which the scenes' gradients would have to be clipped."""
    return statistics.median(limit_of(length(scene.given), length(scene.truth.raw)) for scene in scenes)


def _common_limits(scenes: list[Scene]) -> tuple[float, ...]:
    """Return the same for each rank's share, as far as the shares can be told apart."""
    limits = []
    for scene in scenes:
        parts = scene.truth.parts[0]
        weights = fit_weights(parts, scene.given, list(scene.given))
        if scene.micro_batches > 1 or weights is None or len(parts) != scene.world:
            return ()
        lengths = [length(part) for part in parts]
        limits.append([limit_of(w * own * len(parts), own) for w, own in zip(weights, lengths, strict=True)])
    return tuple(map(statistics.median, zip(*limits, strict=True)))


def _misfit(explanation: Explanation, scenes: list[Scene], analysis: TraceAnalysis, silent: float = math.inf) -> float:
    """Return the largest error over scenes, each with its best candidate; ``silent`` where there is none."""
    worst = 0.0
    for scene in scenes:
        candidates = explanation.predict(scene)
        worst = max(worst, min((_error(scene, c, analysis) for c in candidates), default=silent))
        if worst > analysis.limit:
            break
    return worst


def _error(scene: Scene, predicted: Tensors, analysis: TraceAnalysis) -> float:
    """Return the largest error of any tensor, in × noise."""
    return max((_error_of(scene, name, predicted, analysis) for name in scene.truth.units), default=0.0)


def _error_of(scene: Scene, name: str, predicted: Tensors, analysis: TraceAnalysis) -> float:
    """Return the error of one tensor, in × noise; the noise of a larger prediction is larger."""
    right = scene.truth.contract[name]
    expected = predicted.get(name, torch.zeros_like(right))
    size = norm(right)
    growth = max(1.0, norm(expected) / size) if size else 1.0
    noise = analysis.noise.at(name, scene.truth.units[name]) * growth
    error = distance(scene.given[name], expected)
    return error / noise if noise else (float("inf") if error else 0.0)


def _least_error(scene: Scene, name: str, analysis: TraceAnalysis) -> float:
    """Return how far a tensor is from the nearest thing that is right, in × noise."""
    rights = (scene.truth.contract, *scene.truth.one_device)
    return min(_error_of(scene, name, right, analysis) for right in rights)


def _worst_parameter(scene: Scene, analysis: TraceAnalysis) -> str | None:
    return max(
        scene.truth.units,
        key=lambda name: _error_of(scene, name, scene.truth.contract, analysis),
        default=None,
    )


def _fill(text: str, scene: Scene) -> str:
    return text.format(
        world=scene.world,
        micro_batches=scene.micro_batches,
        scale=scene.step.scale,
        rank=scene.rank,
        factor=f"{scene.factor:.4g}",
    )


def _figures(scene: Scene) -> str:
    """Describe the wrong gradient beside the right one: its length, its direction."""
    names = list(scene.truth.contract)
    right, given = (flat(gradient, scene.truth.contract, names) for gradient in (scene.truth.contract, scene.given))
    cosine = float(torch.nn.functional.cosine_similarity(given, right, dim=0))
    ratio = norm(given) / norm(right) if norm(right) else float("inf")
    return f"at {scene.place} it is {ratio:.4g} × as long as the right one, cosine {cosine:.4f}"
