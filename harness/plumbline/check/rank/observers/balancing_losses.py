"""Notes losses that are computed from the scores of routers alone, and their weights in the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.router_graph import (
    Term,
    attached_numbers,
    is_scripts,
    nodes_reached,
    only_from,
    terms_of,
)
from plumbline.check.rank.observers.unused_losses import is_auxiliary


@dataclass(eq=False)
class _Balancing:
    """A loss term that is computed from scores alone, and the gradients that arrive at it in the backward pass."""

    term: Term
    own: list[float]
    function: str = ""
    times: int = 1
    weights: list[Tensor] = field(default_factory=list)


class BalancingLosses:
    """Finds the balancing losses in the graph of a backward pass, and the gradient that arrives at each.

    ``facts`` has ``balancing``, the loss terms that are computed from scores alone. For each it has ``own``, the
    constants that multiply this term but not the others, outermost first; ``times``, how often it is added;
    ``function``, the function that attaches it, "" if it is added to the loss; and ``weight``, the gradient that
    arrives at it. ``main``: the factor of each other term, and whether the term is a mean. ``constant``: if a number
    without a gradient is added to the loss, the names of losses without a gradient that modules hold. ``dropped``:
    names of the script's functions that attach such a term to a tensor that nothing uses.

    ``reached`` has the ids of the nodes of scores that a gradient of the other terms reaches, and ``balanced`` those
    that one of these terms reaches.
    """

    def __init__(self) -> None:
        self._attached: list[tuple[str, Any]] = []
        self._found: list[_Balancing] = []
        self._others: Facts = {}
        self._handles: list[Any] = []
        self.reached: set[int] = set()
        self.balanced: set[int] = set()

    @property
    def facts(self) -> Facts:
        made = [_facts(one) for one in self._found]
        return {"balancing": [one for one in made if one is not None], **self._others}

    def forget(self) -> None:
        """Drop the references to the graph."""
        self._release()
        self._attached = []

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._found, self._handles, self._others = [], [], {}
        self.reached, self.balanced = set(), set()

    def note_function(self, kind: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note a number with a gradient that a function is given in addition to the tensor that it returns."""
        if type(result) is not Tensor or result.grad_fn is None or result.numel() < 2 or not is_scripts(result.grad_fn):
            return
        numbers = [one for one in args if isinstance(one, Tensor) and one.numel() == 1 and one.grad_fn is not None]
        if numbers:
            self._attached.append((kind.__name__, numbers[0].grad_fn))

    def look(self, root: Any, scores: Mapping[int, Any], roots: Sequence[nn.Module]) -> None:
        """Find the losses in the graph from ``root`` while it exists. ``scores``: the nodes of scores, by id."""
        self._release()  # left from a backward pass that failed
        terms = terms_of(root)
        balancing = [one for one in terms if one.node is not None and only_from(one.node, scores)]
        main = [one for one in terms if one.node is not None and not any(one is other for other in balancing)]
        if not main:
            return  # the scores are the output
        self.reached = {*nodes_reached([one.node for one in main])} & scores.keys()
        shared = {place for one in main for place, _ in one.constants}
        for one in balancing:
            self._add(_Balancing(one, [constant for place, constant in one.constants if place not in shared]))
        reached = []
        for node, function in attached_numbers([one.node for one in main]):
            reached.append(node)
            for one in terms_of(node):
                if one.node is not None and only_from(one.node, scores):
                    self._add(_Balancing(one, [constant for _, constant in one.constants], function))
        self.balanced = {*nodes_reached([one.term.node for one in self._found])} & scores.keys()
        self._others = {
            "main": [[one.factor, _is_mean(one.node)] for one in main],
            "constant": sorted(_without_graph(roots)) if any(one.node is None for one in terms) else [],
            "dropped": self._dropped(scores, reached),
        }

    def _dropped(self, scores: Mapping[int, Any], reached: Sequence[Any]) -> list[str]:
        unused = [(name, one) for name, one in self._attached if not any(one is other for other in reached)]
        unused = [(name, one) for name, one in unused if only_from(one, scores)]
        if not unused:
            return []
        # The scores may belong to another backward pass, as a generator's do when the discriminator is trained.
        return sorted({name for name, one in unused if self.reached & nodes_reached([one]).keys()})

    def _add(self, one: _Balancing) -> None:
        known = next((other for other in self._found if other.term.node is one.term.node), None)
        if known is not None:
            known.times += 1
            return
        self._found.append(one)
        # The hook must not hold the node, which would otherwise never be freed.
        self._handles.append(one.term.node.register_prehook(partial(_arrives, one.weights, one.term.output)))


def _arrives(weights: list[Tensor], output: int, cotangents: tuple[Tensor | None, ...]) -> None:
    given = cotangents[output] if output < len(cotangents) else None
    if given is not None:
        weights.append(given.detach().double().sum())


def _facts(one: _Balancing) -> Facts | None:
    weight = float(torch.stack(one.weights).sum()) if one.weights else 0.0
    if not math.isfinite(weight):
        return None
    return {"own": one.own, "weight": weight, "times": one.times, "function": one.function}


def _without_graph(roots: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the names of nonzero numbers without a graph that modules hold as balancing losses."""
    for root in roots:
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                is_named = is_auxiliary(name) or "balanc" in name.lower()
                if is_named and isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and value:
                    yield f"{path}.{name}" if path else f"{type(root).__name__}.{name}"


def _is_mean(node: Any) -> bool:
    return type(node).__name__.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
