"""Micro-batches that were weighed wrongly, lost, or left unsynchronised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, added, fit, mean, scaled, weighted
from harness.judge.oracle.oracle import clipped, mean_gradient


def _not_divided(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1:
        yield clipped(scaled(scene.micro_batches, scene.truth.raw), scene.clip_norm)


def _divided_twice(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1:
        yield clipped(scaled(1 / scene.micro_batches, scene.truth.raw), scene.clip_norm)


def _divided_by_full_length_too(scene: Scene) -> Iterable[Tensors]:
    if scene.accumulate > 1:
        yield clipped(scaled(1 / scene.accumulate, scene.truth.raw), scene.clip_norm)


def _short_window_divided_by_full_length(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches < scene.accumulate:
        yield clipped(scaled(scene.micro_batches / scene.accumulate, scene.truth.raw), scene.clip_norm)


def _some_micro_batches(kept: Sequence[Sequence[Tensors]], scene: Scene) -> Iterable[Tensors]:
    share = mean_gradient(kept)
    yield clipped(scaled(len(kept) / scene.micro_batches, share), scene.clip_norm)
    yield clipped(share, scene.clip_norm)


def _only_last(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1:
        yield from _some_micro_batches(scene.truth.parts[-1:], scene)


def _first_missing(scene: Scene) -> Iterable[Tensors]:
    for lost in range(1, scene.micro_batches):
        yield from _some_micro_batches(scene.truth.parts[lost:], scene)


def _last_missing(scene: Scene) -> Iterable[Tensors]:
    for kept in range(1, scene.micro_batches):
        yield from _some_micro_batches(scene.truth.parts[:kept], scene)


def _middle_missing(scene: Scene) -> Iterable[Tensors]:
    for lost in range(1, scene.micro_batches - 1):
        yield from _some_micro_batches([*scene.truth.parts[:lost], *scene.truth.parts[lost + 1 :]], scene)


def _not_zeroed(scene: Scene) -> Iterable[Tensors]:
    if scene.earlier is not None:
        yield clipped(added(scene.truth.raw, scene.earlier), scene.clip_norm)


def _partly_synchronised(scene: Scene) -> Iterable[Tensors]:
    """Predict that only one micro-batch was averaged over the ranks, or all but one."""
    own = scene.own(scene.rank)
    if scene.world == 1 or scene.micro_batches == 1 or len(own) < scene.micro_batches:
        return
    together = [mean(groups) for groups in scene.truth.parts]
    alone = [parts[0] for parts in own]
    for place in range(scene.micro_batches):
        one = [together[i] if i == place else alone[i] for i in range(scene.micro_batches)]
        rest = [alone[i] if i == place else together[i] for i in range(scene.micro_batches)]
        for chosen in (one, rest):
            yield clipped(mean(chosen), scene.clip_norm)


def _reduced_again(scene: Scene) -> Iterable[Tensors]:
    """Predict that the sum so far was added up over ranks, or divided by their number, with every micro-batch."""
    count = scene.micro_batches
    if scene.world == 1 or count == 1:
        return
    each = [mean(groups) for groups in scene.truth.parts]
    for factor in (scene.world, 1 / scene.world):
        for least in (0, 1, -1):
            powers = [factor ** (count - 1 - place + least) / count for place in range(count)]
            yield clipped(weighted(each, powers, scene.truth.raw), scene.clip_norm)


def _constant(scene: Scene) -> Iterable[Tensors]:
    if scene.accumulate > 1:
        yield clipped(scaled(scene.factor, scene.truth.raw), scene.clip_norm)


def _weighed_wrongly(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1 and scene.clip_norm is None and not scene.evenly:
        fitted = fit([mean(groups) for groups in scene.truth.parts], scene.given, list(scene.given))
        if fitted is not None:
            yield fitted


EXPLANATIONS = (
    Explanation(
        "not-divided-by-micro-batches", "accumulation",
        "the sum over {micro_batches} micro-batches, not their mean",
        "the loss is not divided by the number of micro-batches", _not_divided,
    ),
    Explanation(
        "short-window-divided-by-full-length", "accumulation",
        "divided by the full window although this one has only {micro_batches} micro-batches",
        "the last window of an epoch is divided by accumulate, not by its own length",
        _short_window_divided_by_full_length,
    ),
    Explanation(
        "only-last-micro-batch", "accumulation",
        "those of the last of {micro_batches} micro-batches",
        "gradients are zeroed, or synchronised, for every micro-batch", _only_last,
    ),
    Explanation(
        "first-micro-batches-missing", "accumulation",
        "without the first of {micro_batches} micro-batches",
        "something wiped the gradients in the middle of the window: a validation, a zero_grad()", _first_missing,
    ),
    Explanation(
        "last-micro-batches-missing", "accumulation",
        "without the last of {micro_batches} micro-batches",
        "the optimizer stepped before the window was complete", _last_missing,
    ),
    Explanation(
        "micro-batch-missing", "accumulation",
        "without one of {micro_batches} micro-batches",
        "a micro-batch's gradient was lost or overwritten", _middle_missing,
    ),
    Explanation(
        "divided-twice", "accumulation",
        "divided by the number of micro-batches twice",
        "both the trainer and the loss divide", _divided_twice,
    ),
    Explanation(
        "divided-twice", "accumulation",
        "divided by the number of micro-batches, and by that of a full window too",
        "both the trainer and the loss divide", _divided_by_full_length_too,
    ),
)  # fmt: skip

NOT_ZEROED = (
    Explanation(
        "previous-step-not-zeroed", "accumulation",
        "this step's plus those of the step before",
        "zero_grad() is missing", _not_zeroed,
    ),
)  # fmt: skip

GENERAL = (
    Explanation(
        "some-micro-batches-not-synchronised", "accumulation",
        "averaged over ranks for some of {micro_batches} micro-batches and rank {rank}'s own for others",
        "which micro-batches run inside no_sync()? All but the last may", _partly_synchronised,
    ),
    Explanation(
        "reduced-with-every-micro-batch", "accumulation",
        "reduced over ranks again with every micro-batch",
        "what was added up before is in the all-reduce once more: reduce once a window", _reduced_again,
    ),
)  # fmt: skip

CONSTANT = (
    Explanation(
        "scaled-by-a-constant", "accumulation",
        "{factor} × the right ones at every step",
        "by what is the loss of a micro-batch divided?", _constant,
    ),
)  # fmt: skip

FITTED = (
    Explanation(
        "micro-batches-weighed-wrongly", "accumulation",
        "made of the right {micro_batches} micro-batches with the wrong weights",
        "by what is the loss of each micro-batch divided?", _weighed_wrongly,
    ),
)  # fmt: skip
