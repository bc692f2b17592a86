"""Whether the loss of a step is divided by its micro-batches: once, not at all, or twice."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.check.evidence.training import BackwardPass, RecordedRank, RecordedStep
from plumbline.check.judge.noted import HeadlineNote, headline_note
from plumbline.check.judge.step_objective import (
    NEAR,
    StepObjective,
    equals,
    factor_of,
    have_own_batches,
    steps_together,
)
from plumbline.core.finding import Finding
from plumbline.judge.findings import failed_with_hint

CHECK = "objective"


def divided_wrongly(objectives: Sequence[StepObjective]) -> Finding | None:
    """Return the failure of a loss that is divided by the number of micro-batches not at all, or twice.

    Only where nothing else explains it: each micro-batch is the next batch of one loader and has one loss, a mean, and
    every one of them has exactly that weight on every rank at every step. Two losses that are added by two backward
    passes, as in a GAN, do not look like that.
    """
    counts = {len(rank) for one in objectives for rank in one.ranks}
    shares = [share for one in objectives for share in one.shares]
    count = max(counts)
    if not all(abs(one.factor - 1) <= NEAR for one in objectives):
        return None  # gradients are divided, or their length is changed, after the backward passes
    if len(counts) > 1 or count < 2 or not all(one.batches_differ for one in objectives):
        return None
    if len({(share.function, share.reduction) for share in shares}) > 1 or shares[0].reduction not in (
        "mean",
        "batchmean",
    ):
        return None
    if all(equals(share.weight, 1.0) for share in shares):
        return failed_with_hint(
            CHECK,
            f"the gradient is the sum over {count} micro-batches, not their mean",
            f"divide the loss by {count}",
            cause="not-divided-by-micro-batches",
            family="accumulation",
        )
    # With two micro-batches a quarter may be a constant that belongs to the loss: ½ of a square, and its mean.
    if count > 2 and all(equals(share.weight, 1 / count**2) and share.is_alone for share in shares):
        return failed_with_hint(
            CHECK,
            f"the loss of each of {count} micro-batches has the weight 1/{count**2} instead of 1/{count}",
            f"divide the loss by {count} only once, either in the script or in its trainer",
            cause="divided-twice",
            family="accumulation",
        )
    return None


def summed_micro_batches(ranks: Sequence[RecordedRank]) -> HeadlineNote | None:
    """Return the note on a step that adds up the mean losses of its micro-batches, however these are computed."""
    steps = list(steps_together(ranks))
    counts = {len(step.passes) for own in steps for step in own}
    if len(counts) != 1 or (count := counts.pop()) < 2 or len({own[0].optimizer for own in steps}) > 1:
        return None
    sizes = {
        one["loader"]: one["batch_size"] for rank in ranks for one in rank.facts.get("loaders", {}).get("loaders", ())
    }
    for own in steps:
        if not abs(factor_of(own) - 1) <= NEAR:
            return None
        for step in own:
            if step.other_passes or not all(_is_mean(one, count) for one in step.passes):
                return None
            if not (have_own_batches(step) or _have_own_rows(step, sizes)):
                return None
    return headline_note(
        CHECK,
        f"The gradient is the sum over {count} micro-batches, not their mean. Divide the loss by {count} if a mean is "
        "meant.",
    )


def _is_mean(one: BackwardPass, count: int) -> bool:
    """Say whether what a pass differentiates is a mean, or a sum of means, that is not divided by ``count``."""
    noted = one.facts.get("objective", {})
    calls, means = noted.get("calls", ()), noted.get("means")
    if len(calls) == 1 and calls[0]["weight"] is not None:
        means = [[calls[0]["weight"]]]
    return bool(means) and all(
        any(equals(weight / one.scale, 1.0) for weight in weights)
        and not any(equals(weight / one.scale, 1 / count) for weight in weights)
        for weights in means
    )


def _have_own_rows(step: RecordedStep, sizes: dict[int, int | None]) -> bool:
    """Say whether passes follow one forward each, of one module, with other rows: parts of one batch, if it is known.

    Other rows may be the same ones in another view. These are as many as the batch has, and parts of it are fewer.
    """
    forwards = [one.facts.get("batches", {}).get("forwards", ()) for one in step.passes]
    if any(len(own) != 1 or "order" not in own[0] for own in forwards):
        return False
    made = [own[0] for own in forwards]
    if len({one["module"] for one in made}) > 1 or len({one["order"] for one in made}) < len(made):
        return False
    batches = [one["fetched"] for one in made]
    if not any(batches):
        return len({one["rows"] for one in made[:-1]}) == 1 and made[-1]["rows"] <= made[0]["rows"]
    size = sizes.get(batches[0]["loader"]) if batches[0] else None
    return size is not None and all(one == batches[0] for one in batches) and sum(o["rows"] for o in made) <= size
