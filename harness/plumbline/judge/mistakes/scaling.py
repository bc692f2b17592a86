"""All or some gradients multiplied by a wrong number: the number of ranks, a loss scale, zero or minus one."""

from __future__ import annotations

from plumbline.judge.hypothesis import register
from plumbline.judge.truth import (
    Combination,
    GradientCase,
    GradientMistake,
    Predictions,
    in_some_parameters,
    multiplied,
    several,
)


def _other_count(case: GradientCase) -> list[float]:
    """Return the nearest factor of a sum over ranks that is divided by a wrong count, or of the inverse mistake."""
    if case.world == 1:
        return []
    counts = [count for count in range(1, 2 * case.world + 1) if count != case.world]
    factors = [case.world / count for count in counts] + [count / case.world for count in counts]
    return [min(factors, key=lambda factor: abs(factor - case.factor))]


def _own_share_counted_again(case: GradientCase) -> Predictions:
    world, own = case.world, case.rank
    if world > 1 and case.micro_batches == 1 and case.has_shares[own]:
        for more in (float(world), 1.0):
            yield Combination(lambda r, b, n, more=more: 1 + more * (r == own))  # type: ignore[misc]
        yield Combination(lambda r, b, n: world / (world - 1) * (r != own))


def _scales_differ(case: GradientCase) -> Predictions:
    own, scales = case.scale, case.scales
    if own and len(set(scales)) > 1 and case.micro_batches == 1:
        yield Combination(lambda r, b, n: (scales[r] or 1.0) / own)


register(
    GradientCase,
    GradientMistake("summed-over-ranks", "averaging", multiplied(lambda case: several(case.world)),
        "the sum over {world} ranks, not their mean",
        "divide the loss, or the result of the all-reduce, by the world size", 690),
    GradientMistake("averaged-twice", "averaging", multiplied(lambda case: [1 / n for n in several(case.world)]),
        "divided by the world size of {world} twice",
        "divide once: DistributedDataParallel averages already", 620),
    GradientMistake("divided-by-another-count", "averaging", multiplied(_other_count),
        "{factor} × the right ones at every step",
        "divide the sum by the number of ranks that add to it, not by the number of nodes, of GPUs per node, or of "
        "ranks in another group", 360),
    GradientMistake("some-tensors-summed", "averaging",
        in_some_parameters(multiplied(lambda case: several(case.world))),
        "averaged for some parameters and summed over {world} ranks for others",
        "divide the gradients of all parameters by the world size", 355),
    GradientMistake("some-tensors-averaged-twice", "averaging",
        in_some_parameters(multiplied(lambda case: [1 / n for n in several(case.world)])),
        "divided by the world size of {world} twice for some parameters",
        "average the gradients of these parameters once", 350),
    GradientMistake("own-part-counted-again", "averaging", _own_share_counted_again,
        "the average, but with rank {rank}'s own part counted twice or left out",
        "add each rank's gradient to the all-reduced sum exactly once", 340),
    GradientMistake("unscaled-twice", "amp", multiplied(lambda case: [1 / case.scale] if case.scale else []),
        "divided by the loss scale of {scale} twice",
        "unscale once: in the trainer or in the GradScaler", 975),
    GradientMistake("loss-scale-left-in", "amp", multiplied(lambda case: [case.scale] if case.scale else []),
        "those of the scaled loss",
        "call scaler.step(optimizer), which unscales them", 970),
    GradientMistake("scales-differ", "amp", _scales_differ,
        "the mean of gradients that each rank multiplied by a different loss scale",
        "use the same loss scale on all ranks", 965),
    GradientMistake("zero", "optimizer", multiplied(lambda case: [0.0] if all(case.zeros) else []),
        "all zero",
        "call zero_grad() after the optimizer's step, not before it, and do not detach the loss", 935),
    GradientMistake("some-zero", "optimizer",
        in_some_parameters(multiplied(lambda case: [0.0] if any(case.zeros) else [])),
        "right for some parameters and zero for others",
        "check what detaches, freezes or zeroes these parameters between the loss and the step", 930),
    GradientMistake("sign-flipped", "optimizer", multiplied(lambda case: [-1.0]),
        "the right ones with the opposite sign",
        "do not negate the loss or the gradients, and create the optimizer without maximize=True", 925),
)  # fmt: skip
