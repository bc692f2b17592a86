"""Micro-batches that were weighted wrongly, lost, or not synchronised."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import added, fit, mean, scaled, weighted
from plumbline.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _not_divided(case: GradientCase) -> Gradients:
    if case.micro_batches > 1:
        yield clipped(scaled(case.micro_batches, case.expected.raw), case.clip_norm)


def _divided_twice(case: GradientCase) -> Gradients:
    if case.micro_batches > 1:
        yield clipped(scaled(1 / case.micro_batches, case.expected.raw), case.clip_norm)


def _divided_by_full_length_too(case: GradientCase) -> Gradients:
    if case.accumulate > 1:
        yield clipped(scaled(1 / case.accumulate, case.expected.raw), case.clip_norm)


def _short_window_divided_by_full_length(case: GradientCase) -> Gradients:
    if case.micro_batches < case.accumulate:
        yield clipped(scaled(case.micro_batches / case.accumulate, case.expected.raw), case.clip_norm)


def _some_micro_batches(kept: Sequence[Sequence[Tensors]], case: GradientCase) -> Gradients:
    share = mean_gradient(kept)
    yield clipped(scaled(len(kept) / case.micro_batches, share), case.clip_norm)
    yield clipped(share, case.clip_norm)


def _only_last(case: GradientCase) -> Gradients:
    if case.micro_batches > 1:
        yield from _some_micro_batches(case.expected.parts[-1:], case)


def _first_missing(case: GradientCase) -> Gradients:
    for lost in range(1, case.micro_batches):
        yield from _some_micro_batches(case.expected.parts[lost:], case)


def _last_missing(case: GradientCase) -> Gradients:
    for kept in range(1, case.micro_batches):
        yield from _some_micro_batches(case.expected.parts[:kept], case)


def _middle_missing(case: GradientCase) -> Gradients:
    for lost in range(1, case.micro_batches - 1):
        yield from _some_micro_batches([*case.expected.parts[:lost], *case.expected.parts[lost + 1 :]], case)


def _not_zeroed(case: GradientCase) -> Gradients:
    if case.previous is not None:
        yield clipped(added(case.expected.raw, case.previous), case.clip_norm)


def _partly_left_in(case: GradientCase) -> Gradients:
    """Predict that some ranks begin with the step before, which is averaged, or divided by the window, once more."""
    counts = range(1, case.world + 1)
    factors = {count / part for count in counts for part in (1, case.world, case.micro_batches)}
    factors |= {count / case.world / case.micro_batches for count in counts}
    if case.previous is None:
        return
    for factor in sorted(factors - {1.0}):
        yield clipped(added(case.expected.raw, scaled(factor, case.previous)), case.clip_norm)


def _partly_synchronised(case: GradientCase) -> Gradients:
    """Predict that only one micro-batch was averaged over the ranks, or all but one."""
    own = case.own_parts(case.rank)
    if case.world == 1 or case.micro_batches == 1 or len(own) < case.micro_batches:
        return
    together = [mean(groups) for groups in case.expected.parts]
    alone = [parts[0] for parts in own]
    for place in range(case.micro_batches):
        one = [together[i] if i == place else alone[i] for i in range(case.micro_batches)]
        rest = [alone[i] if i == place else together[i] for i in range(case.micro_batches)]
        for chosen in (one, rest):
            yield clipped(mean(chosen), case.clip_norm)


def _reduced_again(case: GradientCase) -> Gradients:
    """Predict that the sum so far was summed over ranks, or divided by their number, after every micro-batch."""
    count = case.micro_batches
    if case.world == 1 or count == 1:
        return
    each = [mean(groups) for groups in case.expected.parts]
    for factor in (case.world, 1 / case.world):
        for least in (0, 1, -1):
            powers = [factor ** (count - 1 - place + least) / count for place in range(count)]
            yield clipped(weighted(each, powers, case.expected.raw), case.clip_norm)


def _constant(case: GradientCase) -> Gradients:
    if case.accumulate > 1:
        yield clipped(scaled(case.pattern.factor, case.expected.raw), case.clip_norm)


def _weighed_wrongly(case: GradientCase) -> Gradients:
    if case.micro_batches > 1 and not case.pattern.only_scaled:
        fitted = fit([mean(groups) for groups in case.expected.parts], case.observed, list(case.observed))
        if fitted is not None:
            yield fitted


PREVIOUS_STEP_NOT_ZEROED = GradientHypothesis(
    "previous-step-not-zeroed", "accumulation", _not_zeroed,
    "this step's plus those of the step before",
    "zero_grad() is missing", 605,
)  # fmt: skip

HYPOTHESES = (
    GradientHypothesis("not-divided-by-micro-batches", "accumulation", _not_divided,
        "the sum over {micro_batches} micro-batches, not their mean",
        "the loss is not divided by the number of micro-batches", 675),
    GradientHypothesis("short-window-divided-by-full-length", "accumulation", _short_window_divided_by_full_length,
        "divided by the length of a full window, although this one has only {micro_batches} micro-batches",
        "divide the last window of an epoch by its own length, not by accumulate", 670),
    GradientHypothesis("only-last-micro-batch", "accumulation", _only_last,
        "those of the last of {micro_batches} micro-batches",
        "gradients are zeroed, or synchronised, for every micro-batch", 665),
    GradientHypothesis("first-micro-batches-missing", "accumulation", _first_missing,
        "without the first of {micro_batches} micro-batches",
        "something cleared the gradients in the middle of the window: an evaluation, a zero_grad()?", 660),
    GradientHypothesis("last-micro-batches-missing", "accumulation", _last_missing,
        "without the last of {micro_batches} micro-batches",
        "the optimizer stepped before the window was complete, or the last backward is left out", 655),
    GradientHypothesis("micro-batch-missing", "accumulation", _middle_missing,
        "without one of {micro_batches} micro-batches",
        "a micro-batch's gradient was lost or overwritten", 650),
    GradientHypothesis("divided-twice", "accumulation", _divided_twice,
        "divided by the number of micro-batches twice",
        "both the trainer and the loss divide", 645),
    GradientHypothesis("divided-twice", "accumulation", _divided_by_full_length_too,
        "divided by the number of micro-batches, and by that of a full window too",
        "both the trainer and the loss divide", 640),
    PREVIOUS_STEP_NOT_ZEROED,
    GradientHypothesis("previous-step-partly-left-in", "accumulation", _partly_left_in,
        "this step's plus a part, or a multiple, of those of the step before",
        "zero_grad() is missing, on some ranks or on all of them, and what is left is averaged or divided again", 318),
    GradientHypothesis("some-micro-batches-not-synchronised", "accumulation", _partly_synchronised,
        "averaged over ranks for some of {micro_batches} micro-batches and rank {rank}'s own for others",
        "which micro-batches run inside no_sync()? All but the last may", 320),
    GradientHypothesis("reduced-with-every-micro-batch", "accumulation", _reduced_again,
        "reduced over ranks again with every micro-batch",
        "each all-reduce includes what was accumulated before: reduce once a window", 315),
    GradientHypothesis("scaled-by-a-constant", "accumulation", _constant,
        "{factor} × the right ones at every step",
        "what is the loss of a micro-batch divided by?", 80),
    GradientHypothesis("micro-batches-weighed-wrongly", "accumulation", _weighed_wrongly,
        "made of the right {micro_batches} micro-batches with the wrong weights",
        "what is the loss of each micro-batch divided by?", 55),
)  # fmt: skip
