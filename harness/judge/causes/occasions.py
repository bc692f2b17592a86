"""When a mistake happens that does not happen at every step: what else tells these steps from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.judge.causes.explanation import Scene


def _evaluated(scene: Scene) -> bool:
    """Say whether the model was evaluated, or should have been, after some micro-batch of the step's window."""
    return any(step == scene.index and micro_batches for step, micro_batches in scene.laboratory.evaluations())


def _after_an_evaluation(scene: Scene) -> bool:
    """Say whether an evaluation came before the step's last micro-batch, in its epoch."""
    begin = scene.index - scene.index % scene.laboratory.steps_per_epoch
    return any((begin, 0) < place < (scene.index + 1, 0) for place in scene.laboratory.evaluations())


def _after_the_first_evaluation(scene: Scene) -> bool:
    return any(place < (scene.index + 1, 0) for place in scene.laboratory.evaluations())


def _place_in_epoch(scene: Scene) -> int:
    return scene.index % scene.laboratory.steps_per_epoch


OCCASIONS: dict[str, Callable[[Scene], bool]] = {
    "in a step that leaves parameters unused": lambda scene: bool(scene.unused),
    "in a window in which the model is evaluated": _evaluated,
    "after an evaluation, until the epoch ends": _after_an_evaluation,
    "after the first evaluation": _after_the_first_evaluation,
    "in a short window": lambda scene: scene.micro_batches < scene.accumulate,
    "in a full window": lambda scene: scene.micro_batches == scene.accumulate > 1,
    "in the first step": lambda scene: scene.index == 0,
    "in every step but the first": lambda scene: scene.index > 0,
    "in the first step of an epoch": lambda scene: _place_in_epoch(scene) == 0,
    "in every step of an epoch but its first": lambda scene: _place_in_epoch(scene) > 0,
    "in the last step of an epoch": lambda scene: _place_in_epoch(scene) == scene.laboratory.steps_per_epoch - 1,
    "in the first epoch": lambda scene: scene.index < scene.laboratory.steps_per_epoch,
    "from the second epoch on": lambda scene: scene.index >= scene.laboratory.steps_per_epoch,
    "in every second step, the first one among them": lambda scene: scene.index % 2 == 0,
    "in every second step, beginning with the second": lambda scene: scene.index % 2 == 1,
    "after a skipped step": lambda scene: scene.laboratory.skipped_before(scene.index),
}
"""Properties of a step that do not depend on its gradient, in words, the specific before the general."""


def occasion(wrong: Sequence[Scene], refuting: Sequence[Scene], every: Sequence[Scene]) -> str | None:
    """Return in words what holds for every scene that is wrong, and for none that refutes the explanation."""
    for words, holds in OCCASIONS.items():
        if all(map(holds, wrong)) and not any(map(holds, refuting)):
            return words
    ranks = sorted({scene.rank for scene in wrong})
    # A rank has no scene of its own at a step at which it was handed what an earlier rank was.
    present = all(any(s.index == one.index and s.rank == rank for s in every) for one in wrong for rank in ranks)
    steps = {scene.index for scene in every}
    always = all(any(s.index == step and s.rank == rank for s in every) for step in steps for rank in ranks)
    if present and always and not {scene.rank for scene in refuting} & set(ranks):
        return f"on rank {', '.join(map(str, ranks))} alone"
    return None
