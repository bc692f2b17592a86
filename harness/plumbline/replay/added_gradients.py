"""Gradients that custom autograd functions add to their inputs, whatever gradients arrive at their outputs.

Trainers add auxiliary losses in this way: a function returns its input, and its backward starts a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class AddedGradients:
    """The gradients that the functions of one forward add, by the number of the function.

    ``names`` are those of the functions' classes.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._gradients: dict[int, Sequence[Tensor | None]] = {}
        self._nodes: dict[int, list[Any]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._gradients

    def note(self, number: int, name: str, gradients: Sequence[Tensor | None], results: Iterable[Tensor]) -> None:
        """Note the gradients that a function adds to its inputs, and the nodes of its results in the graph."""
        if any(one is not None for one in gradients):
            self._gradients[number], self.names[number] = gradients, name
            self._nodes[number] = [one.grad_fn for one in results]

    def keep_reached(self, outputs: Iterable[Tensor]) -> None:
        """Drop functions from which no output depends: the backward pass of these outputs does not run them."""
        reached, left = set(), [one.grad_fn for one in outputs if one.grad_fn is not None]
        while left:
            node = left.pop()
            if node not in reached:
                reached.add(node)
                left += [inner for inner, _ in node.next_functions if inner is not None]
        for number, nodes in self._nodes.items():
            if reached.isdisjoint(nodes):
                del self._gradients[number], self.names[number]
        self._nodes.clear()

    def terms(self, number: int, inputs: Sequence[Tensor]) -> tuple[float, float]:
        """Return the product of a function's inputs with the gradients that it adds, and a bound of it."""
        pairs = [
            (gradient, one.detach())
            for gradient, one in zip(self._gradients[number], inputs, strict=True)
            if gradient is not None
        ]
        products = (float((gradient * one).sum()) for gradient, one in pairs)
        return sum(products), sum(float(gradient.norm() * one.norm()) for gradient, one in pairs)
