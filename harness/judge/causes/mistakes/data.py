"""The samples' ids are right, and what stands behind them is not."""

from __future__ import annotations

from collections.abc import Iterable

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene
from harness.judge.oracle.layout import samples
from harness.judge.oracle.oracle import clipped, mean_gradient


def _held_out(scene: Scene) -> Iterable[Tensors]:
    """Predict a training on the samples of the same numbers in the held-out set."""
    laboratory = scene.laboratory
    layout = laboratory.layout(scene.index)
    with laboratory.at(scene.index) as oracle:
        training, held_out = oracle.data, laboratory.held_out(oracle)
        if max(samples(layout), default=0) >= len(held_out):
            return
        oracle.data = held_out
        parts = oracle.group_gradients(layout)
        oracle.data = training
    yield clipped(mean_gradient(parts), scene.clip_norm)


EXPLANATIONS = (
    Explanation(
        "trained-on-held-out-data", "data",
        "those of the held-out samples",
        "is a loader of the validation set used for training?", _held_out,
    ),
)  # fmt: skip
