"""Tests whether the backward of a custom autograd function that communicates can be the derivative of its forward.

The right backward depends on how the function is used. If each rank has its own activations, an all-reduce needs
another all-reduce in its backward. If the computation after it is the same on all ranks, it needs nothing. So each
function is tried with inputs and gradients that differ between ranks, and with equal ones. The backward is wrong if it
is a multiple of the derivative in none of these uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from plumbline.replay.collectives import collectives
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.random_state import normal_like

EPS = 1e-7
"""The distance by which the inputs of a custom function are moved, in multiples of their size."""

LARGEST = 1e-4
"""The largest relative error of a custom function's derivative: float64 leaves nine digits of a difference, and some
inputs may lie at a kink."""

DRAWS = 2
"""The number of random directions and gradients. With only one, any number is a multiple of any other."""

ALIKE, APART = "alike", "apart"
"""The two kinds of inputs and gradients: the same on all ranks, and different on each rank."""

Terms = dict[str, list[float]]
"""By use and draw: the sum of this rank's terms of the derivative and the sum of their squares, then both for the
result of the backward."""


class AppliedFunction:
    """A call of a custom function, which can be repeated with shifted inputs."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run, self._arguments = run, (args, kwargs)
        self.inputs = [one for one in tensors_in((args, kwargs)) if one.requires_grad and one.is_floating_point()]

    def directions(self, generator: torch.Generator) -> list[Tensor]:
        """Return a random direction of the size of each input."""
        sizes = [float(one.detach().square().mean().sqrt() or 1.0) for one in self.inputs]
        return [normal_like(one, generator) * size for one, size in zip(self.inputs, sizes, strict=True)]

    def outputs(self, directions: Sequence[Tensor], length: float) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs that have a gradient, and the leaves that replace the inputs, moved by the directions."""
        along = {id(one): direction for one, direction in zip(self.inputs, directions, strict=True)}
        leaves: dict[int, Tensor] = {}

        def moved(one: Tensor) -> Tensor:
            if id(one) not in along:
                return one.detach().clone()
            leaves[id(one)] = (one.detach() + length * along[id(one)]).requires_grad_()
            return leaves[id(one)].view_as(leaves[id(one)])

        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            args, kwargs = map_tensors(self._arguments, moved)
            found = [one for one in tensors_in(self._run(*args, **kwargs)) if one.requires_grad]
        return found, [leaves[id(one)] for one in self.inputs]

    def change(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the derivative of each output along the directions."""
        (forth, _), (back, _) = self.outputs(directions, EPS), self.outputs(directions, -EPS)
        return [(a.detach() - b.detach()) / (2 * EPS) for a, b in zip(forth, back, strict=True)]


def exchange_terms(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
    """Return this rank's terms of a function, None if it does not communicate. All ranks call this together."""
    before = collectives()
    function = AppliedFunction(run, args, kwargs)
    rank = torch.distributed.get_rank()
    changes: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
    for kind, draw in product((ALIKE, APART), range(DRAWS)):
        directions = function.directions(_generator(kind, draw, rank))
        changes[kind, draw] = directions, function.change(directions)
    if collectives() == before:
        return None
    found: Terms = {}
    for kind, draw in product((ALIKE, APART), range(DRAWS)):
        outputs, leaves = function.outputs(function.directions(_generator(ALIKE, 0, rank)), 0.0)
        if not outputs:
            return {}
        generator = _generator(kind, DRAWS + draw, rank)
        cotangents = [normal_like(one, generator) for one in outputs]
        gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        for of_inputs in (ALIKE, APART):
            directions, moved = changes[of_inputs, draw]
            right = [a * v for a, v in zip(moved, cotangents, strict=True)]
            given = [g * d for g, d in zip(gradients, directions, strict=True) if g is not None]
            found[f"{of_inputs} {kind} {draw}"] = [*_sums(right), *_sums(given)]
    return found


def can_be_a_derivative(every: Sequence[Terms]) -> bool:
    """Return whether a backward is a multiple of the derivative in some use, from the terms of all ranks."""
    if not all(every):
        return True
    for use in product((ALIKE, APART), (ALIKE, APART)):
        totals = [[math.fsum(column) for column in _columns(every, f"{' '.join(use)} {draw}")] for draw in range(DRAWS)]
        (right, squares, given, others), (again, more, received, rest) = totals
        if (squares and not others) or (more and not rest):
            continue  # the backward gave no gradient
        noise = LARGEST * math.sqrt(max(squares, others) * max(more, rest))
        if abs(right * received - again * given) <= noise:
            return True
    return False


def _generator(kind: str, draw: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(draw if kind == ALIKE else 1000 * (rank + 1) + draw)


def _sums(terms: Sequence[Tensor]) -> tuple[float, float]:
    return sum(float(one.sum()) for one in terms), sum(float(one.square().sum()) for one in terms)


def _columns(every: Sequence[Terms], use: str) -> Iterator[tuple[float, ...]]:
    return zip(*(one[use] for one in every), strict=True)
