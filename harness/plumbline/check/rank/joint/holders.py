"""Finds which ranks together hold the pieces of one parameter copy, if optimizers step copies of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from plumbline.check.rank.joint.copies_and_parts import Key, are_near, largest_rounding
from plumbline.check.rank.store_exchange import NoAgreementError
from plumbline.recording.observer import Facts

HOLDERS_UNKNOWN = (
    "the forward communicates, optimizers step pieces of copies of its parameters, and it is not known which ranks "
    "hold one copy together"
)

Weights = Mapping[str, Sequence[float]]
"""Projections of parameters by name."""


def note_holders(every: Sequence[Sequence[Facts]], unit: float) -> None:
    """Note in the ranks' descriptions of parameters which ranks together hold the pieces of one copy.

    Ranks that compute with the same weights either hold one copy in pieces, or one copy each. ``unit`` is the unit
    roundoff of the training.

    Raises:
        NoAgreementError: the holders are unknown.
    """
    parameters: dict[tuple[str, tuple[int, ...]], list[Key]] = {}
    for rank, own in enumerate(every):
        for number, one in enumerate(own):
            if "pieces" in one:
                parameters.setdefault((one["name"], tuple(one["shape"])), []).append((rank, number))
    most = largest_rounding(unit)
    models = [{one["name"]: one["weights"] for one in own if "pieces" in one} for own in every]
    for keys in parameters.values():
        # Parts that are all zeros are alike everywhere, so ranks are told apart by all of their weights if possible.
        by_model = _alike(keys, lambda key: models[key[0]], most)
        by_weights = _alike(keys, lambda key: {"": every[key[0]][key[1]]["weights"]}, most)
        clear = (sets for sets in (by_model, by_weights) if all(_is_clear(every, one) for one in sets))
        found = next(clear, None)
        if found is None:
            raise NoAgreementError(HOLDERS_UNKNOWN)
        for together in found:
            if _times_held(every, together) == 1:
                for rank, number in together:
                    every[rank][number]["ranks"] = [one for one, _ in together]


def _alike(keys: Sequence[Key], weights_of: Callable[[Key], Weights], most: float) -> list[list[Key]]:
    """Return lists of the keys that have the same weights."""
    found: list[list[Key]] = []
    for key in keys:
        like = (others for others in found if _are_same(weights_of(key), weights_of(others[0]), most))
        same = next(like, None)
        if same is None:
            found.append([key])
        else:
            same.append(key)
    return found


def _are_same(ours: Weights, theirs: Weights, most: float) -> bool:
    return ours.keys() == theirs.keys() and all(are_near(values, theirs[name], most) for name, values in ours.items())


def _is_clear(every: Sequence[Sequence[Facts]], together: Sequence[Key]) -> bool:
    """Return whether these ranks hold one copy together, or a whole copy each."""
    return _times_held(every, together) in {1, len(together)}


def _times_held(every: Sequence[Sequence[Facts]], together: Sequence[Key]) -> int:
    """Return how many of these ranks hold each entry of a parameter; 0 if not all entries are held equally often."""
    pieces = [[(start, start + length) for start, length in every[rank][number]["pieces"]] for rank, number in together]
    rank, number = together[0]
    size = math.prod(every[rank][number]["shape"])
    cuts = sorted({0, size, *(end for own in pieces for piece in own for end in piece)})
    counts = {
        sum(any(start <= begin and end <= stop for start, stop in own) for own in pieces)
        for begin, end in pairwise(cuts)
    }
    return counts.pop() if len(counts) == 1 else 0
