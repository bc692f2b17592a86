"""Several optimizers, of which one was treated unlike the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, length, scaled
from harness.judge.causes.mistakes import accumulation, sync
from harness.judge.oracle.oracle import clipped


def _of_one(explanation: Explanation) -> Explanation:
    """Return the mistake that happened to one optimizer's gradients alone."""

    def predict(scene: Scene) -> Iterable[Tensors]:
        shares = scene.laboratory.shares_of_optimizers()
        for wrong in explanation.predict(scene) if len(shares) > 1 else ():
            for share in shares:
                yield {**scene.truth.contract, **{name: value for name, value in wrong.items() if name in share}}

    saw = f"right for one optimizer, and for another {explanation.saw}"
    return Explanation(f"{explanation.name}-in-one-optimizer", explanation.family, saw, explanation.look, predict)


def _passes_left_in(scene: Scene) -> Iterable[Tensors]:
    """Predict that a backward made for one optimizer stays in the gradients of the others until they step.

    What came after an optimizer's own turn is still there at its next one. Where all passes come before the first step,
    every optimizer is handed the sum of them.
    """
    turns, count = scene.step.turns, len(scene.laboratory.shares_of_optimizers())
    if count > 1 and not turns:
        yield clipped(scaled(count, scene.truth.raw), scene.clip_norm)
    if not turns or scene.clip_norm is not None:
        return
    made = scene.laboratory.passes(scene.index)
    before = scene.laboratory.passes(scene.index - 1) if scene.index else []
    total = dict(scene.truth.contract)
    for turn, names in enumerate(turns):
        for name in total.keys() & set(names):
            left = [*before[turn + 1 :], *made[: turn + 1]]
            total[name] = torch.stack([gradient[name] for gradient in left]).sum(0)
    yield total


def _shortened(scene: Scene) -> Iterable[Tensors]:
    """Predict one optimizer's gradients with the right direction, and whatever length they have if it is less."""
    right, given = scene.truth.contract, scene.given
    shares = scene.laboratory.shares_of_optimizers()
    for share in shares if len(shares) > 1 and scene.clip_norm is None else ():
        own = {name: value for name, value in right.items() if name in share}
        due, found = length(own), length({name: given[name] for name in own})
        if 0 < found < due:
            yield {**right, **scaled(found / due, own)}


EXPLANATIONS = (
    Explanation(
        "left-in-by-another-optimizer", "optimizer",
        "the sum over the passes that were made for several optimizers",
        "each optimizer needs the gradients of its own backward: zero all of them in between", _passes_left_in,
    ),
    *map(_of_one, (*accumulation.NOT_ZEROED, *sync.LATE)),
)  # fmt: skip

LAST = (
    Explanation(
        "clipped-in-one-optimizer", "clipping",
        "right for one optimizer, and for another in direction alone: they are too short",
        "nobody asked for clipping", _shortened,
    ),
)  # fmt: skip
