"""Finds the explanation of a wrong gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from harness.core.finding import Finding
from harness.core.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene
from harness.judge.causes.mistakes import MISTAKES
from harness.judge.examination import Examination, same
from harness.judge.noise import distance, norm
from harness.judge.verdict import times


def explain(finding: Finding, examination: Examination) -> Finding:
    """Return the finding with the cause that fits every step and rank at which the gradient is wrong.

    Explanations are tried in their order, the specific before the general, and the first that fits is taken.
    """
    wrong = [scene for scene in _scenes(examination) if not _is_right(scene, examination)]
    if not wrong:
        return finding
    # Once ranks hold different weights there is no common gradient to predict: the beginning tells the cause.
    wrong = [scene for scene in wrong if _ranks_agree_before(scene, examination)] or wrong
    for explanation in MISTAKES:
        error = _misfit(explanation, wrong, examination)
        if error <= examination.limit:
            return replace(
                finding,
                cause=explanation.name,
                family=explanation.family,
                message=(
                    f"gradients at {wrong[0].place} are {_fill(explanation.saw, wrong[0])} ({times(error)} from that; "
                    f"{times(finding.error_x_noise or 0.0)} from right): {explanation.look}"
                ),
            )
    return replace(finding, cause="unexplained", message=f"{finding.message}; unexplained: {_figures(wrong[0])}")


def _scenes(examination: Examination) -> Iterable[Scene]:
    for moment, rank, step in examination.differing_ranks("gradients"):
        before = examination.moments[moment.index - 1].ranks[rank] if moment.index else None
        yield Scene(
            index=moment.index,
            rank=rank,
            world=len(moment.ranks),
            step=step,
            truth=examination.truths[moment.index],
            accumulate=examination.workload.accumulate,
            clip_norm=examination.workload.clip_norm,
            trained=frozenset(examination.oracle.trained),
            earlier=before.gradients if before else None,
        )


def _ranks_agree_before(scene: Scene, examination: Examination) -> bool:
    ranks = examination.moments[scene.index].ranks
    return all(same(step.before, ranks[0].before) for step in ranks[1:])


def _is_right(scene: Scene, examination: Examination) -> bool:
    return any(
        _error(scene, truth, examination) <= examination.limit
        for truth in (scene.truth.contract, *scene.truth.one_device)
    )


def _misfit(explanation: Explanation, scenes: list[Scene], examination: Examination) -> float:
    """Return the largest error over scenes, each with its best candidate; infinite where there is none."""
    worst = 0.0
    for scene in scenes:
        candidates = explanation.predict(scene)
        worst = max(worst, min((_error(scene, c, examination) for c in candidates), default=float("inf")))
        if worst > examination.limit:
            break
    return worst


def _error(scene: Scene, predicted: Tensors, examination: Examination) -> float:
    """Return the largest error of any tensor, in × noise; the noise of a larger prediction is larger."""
    worst = 0.0
    for name, unit in scene.truth.units.items():
        right = scene.truth.contract[name]
        expected = predicted.get(name, torch.zeros_like(right))
        given = scene.step.gradients.get(name, torch.zeros_like(right))
        size = norm(right)
        growth = max(1.0, norm(expected) / size) if size else 1.0
        noise = examination.noise.at(name, unit) * growth
        error = distance(given, expected)
        worst = max(worst, error / noise if noise else (float("inf") if error else 0.0))
    return worst


def _fill(text: str, scene: Scene) -> str:
    return text.format(world=scene.world, micro_batches=scene.micro_batches, scale=scene.step.scale, rank=scene.rank)


def _figures(scene: Scene) -> str:
    """Describe the wrong gradient beside the right one: its length, its direction."""
    names = list(scene.truth.contract)
    right = torch.cat([scene.truth.contract[name].flatten() for name in names])
    given = torch.cat(
        [
            scene.step.gradients.get(name, torch.zeros_like(scene.truth.contract[name])).double().flatten()
            for name in names
        ]
    )
    cosine = float(torch.nn.functional.cosine_similarity(given, right, dim=0))
    ratio = norm(given) / norm(right) if norm(right) else float("inf")
    return f"at {scene.place} it is {ratio:.4g} × as long as the right one, cosine {cosine:.4f}"
