"""Notes losses that are computed from the scores of routers alone, and with which weight they count in a gradient."""

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
    """A term of the loss that is computed from scores alone, and what arrives at it in the backward pass."""

    term: Term
    own: list[float]
    function: str = ""
    times: int = 1
    weights: list[Tensor] = field(default_factory=list)


class BalancingLosses:
    """Finds the balancing losses of a backward pass in its graph, and what arrives at each.

    ``facts`` has ``balancing``, the terms of the loss that are computed from the scores alone: the constants they are
    multiplied by and other terms are not, the outermost first, how often each is added, and its ``weight``, the
    gradient that arrives at it. ``main`` has the factors of the other terms, with whether each is a mean. ``constant``:
    where a number without a gradient is added to the loss, the names of losses without one that modules hold.
    ``dropped`` names functions of the script that attach such a term to a tensor that nothing uses.
    """

    def __init__(self) -> None:
        self._attached: list[tuple[str, Any]] = []
        self._found: list[_Balancing] = []
        self._others: Facts = {}
        self._handles: list[Any] = []

    @property
    def facts(self) -> Facts:
        made = [_facts(one) for one in self._found]
        return {"balancing": [one for one in made if one is not None], **self._others}

    def forget(self) -> None:
        """Let go of the graph."""
        self._release()
        self._attached = []

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._found, self._handles, self._others = [], [], {}

    def note_function(self, kind: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what a function is given beside the tensor that it returns: a number that receives a gradient."""
        if type(result) is not Tensor or result.grad_fn is None or result.numel() < 2 or not is_scripts(result.grad_fn):
            return
        numbers = [one for one in args if isinstance(one, Tensor) and one.numel() == 1 and one.grad_fn is not None]
        if numbers:
            self._attached.append((kind.__name__, numbers[0].grad_fn))

    def look(self, root: Any, scores: Mapping[int, Any], roots: Sequence[nn.Module]) -> None:
        """Find the losses in the graph from ``root``, while it is there. ``scores``: nodes, by their identities."""
        self._release()  # of a backward pass that has failed, and did not end
        terms = terms_of(root)
        balancing = [one for one in terms if one.node is not None and only_from(one.node, scores)]
        main = [one for one in terms if one.node is not None and not any(one is other for other in balancing)]
        if not main:
            return  # the scores are the output
        shared = {place for one in main for place, _ in one.constants}
        for one in balancing:
            self._add(_Balancing(one, [constant for place, constant in one.constants if place not in shared]))
        reached = []
        for node, function in attached_numbers([one.node for one in main]):
            reached.append(node)
            for one in terms_of(node):
                if one.node is not None and only_from(one.node, scores):
                    self._add(_Balancing(one, [constant for _, constant in one.constants], function))
        self._others = {
            "main": [[one.factor, _is_mean(one.node)] for one in main],
            "constant": sorted(_without_graph(roots)) if any(one.node is None for one in terms) else [],
            "dropped": self._dropped([one.node for one in main], scores, reached),
        }

    def _dropped(self, main: Sequence[Any], scores: Mapping[int, Any], reached: Sequence[Any]) -> list[str]:
        unused = [(name, one) for name, one in self._attached if not any(one is other for other in reached)]
        unused = [(name, one) for name, one in unused if only_from(one, scores)]
        if not unused:
            return []
        # Its scores may belong to another backward pass, as those of a generator do in that of the discriminator.
        used = nodes_reached(main).keys() & scores.keys()
        return sorted({name for name, one in unused if used & nodes_reached([one]).keys()})

    def _add(self, one: _Balancing) -> None:
        known = next((other for other in self._found if other.term.node is one.term.node), None)
        if known is not None:
            known.times += 1
            return
        self._found.append(one)
        # The hook must not hold the node, which nobody would ever free if it stayed.
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
    """Yield the names of numbers without a graph that modules hold as balancing losses: 0 is none."""
    for root in roots:
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                is_named = is_auxiliary(name) or "balanc" in name.lower()
                if is_named and isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and value:
                    yield f"{path}.{name}" if path else f"{type(root).__name__}.{name}"


def _is_mean(node: Any) -> bool:
    return type(node).__name__.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
