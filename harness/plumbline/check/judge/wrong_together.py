"""Finds mistakes that no single gradient shows above its noise, but many gradients show together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist

from plumbline.check.evidence.training import Facts
from plumbline.check.judge.joint_gradient import JointGradient
from plumbline.judge.oracle.noise import FALSE_ALARM
from plumbline.judge.truth import scaled

DEVIATIONS = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)
"""How far a measured number may be from the true one, in standard deviations."""

VARIANTS = 3
"""The number of ways in which left-over gradients can appear: unchanged, as in replicas, or, in parts, summed or
divided."""

NAMED_BY_CHANCE = 1e-6
"""The probability that wrong gradients match a mistake by chance. Right gradients are never matched."""

ROUNDING = 1e-6
"""The relative error of a factor between float32 gradients, if nothing else is rounded."""


def has_hidden_left_over(directions: Iterable[Facts], world: int, *, is_wrong: bool = False) -> bool:
    """Return whether the errors along all directions together match what the previous step left.

    Each error alone may be rounding. ``is_wrong``: the training is known to be wrong, and only the cause is sought.
    """
    probability = (NAMED_BY_CHANCE if is_wrong else FALSE_ALARM) / VARIANTS
    known = [one for one in directions if one["left"] != 0 and one["noise"] > 0]
    right = list(map(_right, known))
    received, noise = ([one[key] for one in known] for key in ("received", "noise"))
    left = [(one["left"], one["left_in_parts"]) for one in known]
    return any(_is_explained(received, each, right, noise, probability) for each in _with_left(right, left, world))


def are_only_rounding(directions: Iterable[Facts]) -> bool:
    """Return whether the errors are larger than the gradients.

    Such gradients are rounding. Equal steps repeat it, which looks like what the previous step left.
    """
    every = [(one["received"], _right(one), one["noise"] or 1.0) for one in directions]
    errors = [(received - right) / noise for received, right, noise in every]
    return math.hypot(*errors) > math.hypot(*(right / noise for _, right, noise in every))


def has_left_over(wrong: Sequence[JointGradient]) -> bool:
    """Return whether the wrong gradients contain those of the previous step."""
    right = [case.value(scaled(1.0)) for case in wrong]
    received = [case.received for case in wrong]
    errors = [abs(one - value) for one, value in zip(received, right, strict=True)]
    within = [case.limit * case.noise for case in wrong]
    left = [(case.left, case.left_in_parts) for case in wrong]
    return any(
        all(abs(one - value) <= each for one, value, each in zip(received, predicted, within, strict=True))
        and _is_explained(received, predicted, right, errors, NAMED_BY_CHANCE / VARIANTS)
        for predicted in _with_left(right, left, wrong[0].world)
    )


def _with_left(right: Sequence[float], left: Sequence[tuple[float, float]], world: int) -> Iterator[list[float]]:
    """Yield right gradients plus what the previous step left in them.

    In replicas, averaging equal gradients does not change what is left. In parts, it is summed or divided once more.
    """
    for factor in (1.0, float(world), 1.0 / world):
        yield [value + one + (factor - 1) * part for value, (one, part) in zip(right, left, strict=True)]


def has_last_pass_apart(wrong: Sequence[JointGradient]) -> bool:
    """Return whether the last backward pass of each rank was not reduced, unlike the passes before it."""
    if not all(case.may_have_its_last_pass_apart for case in wrong):
        return False
    received, predicted = [one.received_along_copies for one in wrong], [one.last_pass_apart for one in wrong]
    noise = [one.noise_along_copies for one in wrong]
    others = [one.of_all_copies for one in wrong], [one.own_alone for one in wrong]
    return any(case.shows_its_last_pass for case in wrong) or all(
        _is_explained(received, predicted, other, noise, NAMED_BY_CHANCE) for other in others
    )


def _is_explained(
    received: Sequence[float],
    predicted: Sequence[float],
    other: Sequence[float],
    scale: Sequence[float],
    probability: float,
) -> bool:
    """Return whether a prediction explains how gradients differ from another explanation.

    ``probability`` is the largest allowed probability of a match by chance. Differences are compared in multiples of
    ``scale``. They have to match with and without their component along the other explanation. Without it, a factor in
    all gradients cannot match. With it, rounding that every step repeats cannot match.
    """
    seen, wanted, along = (
        [(one - value) / each for one, value, each in zip(values, below, scale, strict=True)]
        for values, below in ((received, other), (predicted, other), (other, [0.0] * len(other)))
    )
    pairs = (seen, wanted), (_without(seen, along), _without(wanted, along))
    return _are_one_size(seen, wanted) and all(_chance(*each) < probability for each in pairs)


def _chance(seen: Sequence[float], wanted: Sequence[float]) -> float:
    """Return an upper bound of the probability that a vector of random direction is as near to the predicted one.

    In d + 1 dimensions, the sine of the angle between them is below ε with a probability of at most
    ε^d / (d B(d/2, 1/2) √(1 - ε²)), which follows from the area of a cap of the sphere. One dimension is subtracted for
    the projection. Entries that are small compared with others count in part. If the prediction leaves half of the
    vector unexplained, the bound is 1.
    """
    length = math.hypot(*seen)
    if not length:
        return 1.0
    free = (math.fsum(map(abs, seen)) / length) ** 2 - 2
    sine = math.dist(seen, wanted) / length
    if free <= 0 or sine > 0.5:
        return 1.0
    beta = math.exp(math.lgamma(free / 2) + math.lgamma(0.5) - math.lgamma((free + 1) / 2))
    return float(sine**free / (free * beta * math.sqrt(1 - sine**2)))


def _are_one_size(seen: Sequence[float], wanted: Sequence[float]) -> bool:
    """Return whether the factor between two vectors is 1, within the error of its estimate."""
    square = math.fsum(one * one for one in wanted)
    if not square or len(seen) < 2:
        return False
    factor = math.fsum(one * other for one, other in zip(seen, wanted, strict=True)) / square
    rest = math.dist(seen, [factor * one for one in wanted])
    return abs(factor - 1) <= DEVIATIONS * rest / math.sqrt((len(seen) - 1) * square) + ROUNDING


def _without(vector: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the part of a vector that is orthogonal to another one."""
    square = math.fsum(one * one for one in other)
    along = math.fsum(one * each for one, each in zip(vector, other, strict=True)) / square if square else 0.0
    return [one - along * each for one, each in zip(vector, other, strict=True)]


def _right(direction: Facts) -> float:
    return math.fsum(map(math.fsum, direction["shares"]))
