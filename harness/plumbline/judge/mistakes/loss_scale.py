"""A loss scale that stays in the gradients, or is taken out too often."""

from __future__ import annotations

from plumbline.judge.mistakes.case import Combination, GradientCase, GradientMistake, Predictions, scaled


def _left_in(case: GradientCase) -> Predictions:
    if case.scale:
        yield scaled(case.scale)


def _unscaled_twice(case: GradientCase) -> Predictions:
    if case.scale:
        yield scaled(1 / case.scale)


def _scales_differ(case: GradientCase) -> Predictions:
    """Predict the mean of gradients that each rank multiplied by its own scale, divided by this rank's scale."""
    own, scales = case.scale, case.scales
    if own and len(set(scales)) > 1 and case.micro_batches == 1:
        yield Combination(lambda r, b, n: (scales[r] or 1.0) / own)


MISTAKES = (
    GradientMistake("unscaled-twice", "amp", _unscaled_twice,
        "divided by the loss scale of {scale} twice",
        "unscale once: in the trainer or in the GradScaler", 975),
    GradientMistake("loss-scale-left-in", "amp", _left_in,
        "those of the scaled loss",
        "call scaler.step(optimizer), which unscales them", 970),
    GradientMistake("scales-differ", "amp", _scales_differ,
        "the mean of gradients that each rank multiplied by another loss scale",
        "use the same loss scale on all ranks", 965),
)  # fmt: skip
