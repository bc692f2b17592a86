"""Finds low-rank adapters: trainable matrices beside a frozen one, whose product has its shape."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

MOST_PAIRS = 16
"""Pairs of matrices that are returned for a frozen one: adapters are few, and lie near to it."""

Shapes = Mapping[str, tuple[tuple[int, ...], bool]]
"""The shape of each parameter of a module by its name, and whether it requires a gradient."""


def factor_pairs(name: str, shapes: Shapes) -> list[tuple[str, str]]:
    """Return the names of trainable matrices near a frozen one whose product has its shape, or that of its transpose.

    Both together have fewer entries than the frozen one. They lie in its module or in the one that holds this.
    """
    shape, is_trained = shapes[name]
    if is_trained or len(shape) != 2:
        return []
    own = name.rpartition(".")[0]
    for place in dict.fromkeys((own, own.rpartition(".")[0])):
        near = [
            each
            for each, (other, is_trained) in shapes.items()
            if is_trained and len(other) == 2 and (each.startswith(f"{place}.") if place else "." not in each)
        ]
        found = [pair for pair in permutations(near, 2) if _fit(shapes[pair[0]][0], shapes[pair[1]][0], shape)]
        if found:
            return found[:MOST_PAIRS]
    return []


def factors(shapes: Shapes) -> set[str]:
    """Return the names of all trainable matrices that are factors of low rank beside a frozen matrix."""
    return {each for name in shapes for pair in factor_pairs(name, shapes) for each in pair}


def _fit(left: tuple[int, ...], right: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    product = (left[0], right[1])
    is_smaller = left[1] * sum(product) < product[0] * product[1]
    return left[1] == right[0] and is_smaller and product in (shape, shape[::-1])
