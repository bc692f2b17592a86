"""Finds low-rank adapters: trainable matrices near a frozen one, whose product has the shape of the frozen one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

MOST_PAIRS = 16
"""The most pairs of matrices to return for a frozen one. It has few adapters, and they are near it."""

Shapes = Mapping[str, tuple[tuple[int, ...], bool]]
"""The shape of each parameter of a module by its name, and whether it requires a gradient."""


def factor_pairs(name: str, shapes: Shapes) -> list[tuple[str, str]]:
    """Return pairs of names of trainable matrices near a frozen one whose product has its shape, or its transpose's.

    Both together have fewer entries than the frozen matrix. They are in its module or in the parent module.
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
    """Return the names of all trainable matrices that are low-rank factors near a frozen matrix."""
    return {each for name in shapes for pair in factor_pairs(name, shapes) for each in pair}


def _fit(left: tuple[int, ...], right: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    product = (left[0], right[1])
    is_smaller = left[1] * sum(product) < product[0] * product[1]
    return left[1] == right[0] and is_smaller and product in (shape, shape[::-1])
