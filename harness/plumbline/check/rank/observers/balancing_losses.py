"""Notes losses that are computed from the scores of routers alone, and their weights in the gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.loss_terms import SAME_OUTPUTS, SAME_VALUES, scalar_of
from plumbline.check.rank.observers.unused_losses import is_auxiliary, is_number
from plumbline.replay.uses import inputs_of, nodes_before


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
        for node, function in attached_numbers([one.node for one in main]):
            for one in terms_of(node):
                if one.node is not None and only_from(one.node, scores):
                    self._add(_Balancing(one, [constant for _, constant in one.constants], function))
        self.balanced = {*nodes_reached([one.term.node for one in self._found])} & scores.keys()
        self._others = {
            "main": [[one.factor, _is_mean(one.node)] for one in main],
            "constant": sorted(_without_graph(roots)) if any(one.node is None for one in terms) else [],
            "dropped": self._dropped(scores, [one.node for one in main]),
        }

    def _dropped(self, scores: Mapping[int, Any], roots: Sequence[Any]) -> list[str]:
        used = {id(inner) for inner, _ in _given_to_scripts(roots)}
        unused = [(name, one) for name, one in self._attached if id(one) not in used]
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


_MOST_NODES = 64
"""The most nodes between scores and the weights that compute them."""

_MOST_TERMS = 4096
_AT_LEAF = ("TBackward", "TransposeBackward", "ToCopyBackward", "ViewBackward", "PermuteBackward", "UnsqueezeBackward",
            "ExpandBackward", "UnsafeViewBackward", "AliasBackward", "ReshapeAliasBackward")  # fmt: skip
_ELEMENTWISE = ("AddBackward", "SubBackward", "MulBackward", "DivBackward")
_PRODUCTS = ("BmmBackward", "MmBackward", "AddmmBackward", "ScaledDot", "ConvolutionBackward")
_JOINS = ("CatBackward", "StackBackward")


@dataclass(eq=False)
class Scores:
    """Scores: the nodes that compute them. ``origins`` are the nodes that use ``parameters`` directly."""

    nodes: list[Any]
    origins: list[Any]
    parameters: list[Any]


@dataclass(eq=False)
class Term:
    """A number that is added to a loss: its node, and the constants that multiply it, outermost first.

    Each constant comes with the id of the multiplying node, which several terms may share. ``node`` is None if a number
    without a gradient is added.
    """

    node: Any
    output: int
    constants: tuple[tuple[int, float], ...] = ()

    @property
    def factor(self) -> float:
        product = 1.0
        for _, constant in self.constants:
            product *= constant
        return product

    def inner(self, place: tuple[Any, int], *constants: tuple[int, float]) -> Term:
        """Return the term at another place of the graph, which is multiplied by more constants."""
        return Term(*place, (*self.constants, *constants))


def scores_of(node: Any) -> Scores | None:
    """Return what scores are computed from, None if no weights are near, or scores of several layers are joined."""
    found, waiting, seen = Scores([], [], []), [node], set[int]()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > _MOST_NODES or type(one).__name__.startswith(_JOINS):
            return None
        found.nodes.append(one)
        parameters = [leaf for inner, _ in one.next_functions if (leaf := _leaf(inner)) is not None]
        if parameters:
            found.parameters.extend(parameters)
            found.origins.append(one)
        elif type(one).__name__.startswith(_PRODUCTS):
            return None  # of activations, as the scores of attention are
        if not parameters or type(one).__name__.startswith(_ELEMENTWISE):
            waiting.extend(inner for inner, _ in one.next_functions if _leaf(inner) is None)
    return found if found.parameters else None


def _leaf(node: Any) -> Any:
    """Return the parameter that a node hands on, None where it computes something."""
    for _ in range(8):
        if node is None:
            return None
        if hasattr(node, "variable"):
            return node.variable
        if not type(node).__name__.startswith(_AT_LEAF):
            return None
        node = node.next_functions[0][0]
    return None


def terms_of(root: Any) -> list[Term]:
    """Return the numbers that are added up to a loss."""
    terms: list[Term] = []
    waiting = [Term(root, 0)]
    while waiting and len(terms) < _MOST_TERMS:
        one = waiting.pop()
        inner = _inner(one)
        if inner is None:
            terms.append(one)
        else:
            waiting.extend(inner)
    return terms


def _inner(term: Term) -> list[Term] | None:
    """Return the terms of a number that is a sum, or a multiple by a constant; None for any other number."""
    node = term.node
    if node is None:
        return None
    name, following = type(node).__name__, node.next_functions
    if name in SAME_OUTPUTS:
        return [term.inner(following[term.output])]
    if name in SAME_VALUES and is_number(node) and is_number(following[0][0]):
        return [term.inner(following[0])]
    if name in ("AddBackward0", "SubBackward0") and is_number(node):
        alpha = float(node._saved_alpha) * (-1 if name == "SubBackward0" else 1)
        second = () if alpha == 1 else ((id(node), alpha),)
        return [term.inner(following[0]), term.inner(following[1], *second)]
    if not is_number(node) or (constant := scalar_of(node, name)) is None:
        return None
    place = next((one for one in following if one[0] is not None), (None, 0))
    return [term.inner(place, (id(node), constant))]


def only_from(node: Any, scores: Collection[int]) -> bool:
    """Return whether a number depends on these scores, and on weights only through them."""
    is_reached = False
    for one in nodes_before([node], lambda one: () if id(one) in scores else inputs_of(one)):
        if id(one) in scores:
            is_reached = True
        elif hasattr(one, "variable") or _has_labels(one):
            return False
    return is_reached


def nodes_reached(roots: Collection[Any]) -> dict[int, Any]:
    """Return, by id, the nodes that a gradient from these roots reaches."""
    return {id(one): one for one in nodes_before(roots)}


def _has_labels(node: Any) -> bool:
    target = getattr(node, "_saved_target", None)
    return target is not None and not target.is_floating_point()


def attached_numbers(roots: Collection[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of numbers to which functions that a script defines pass gradients, with the functions' names.

    Such a function returns a tensor as it is, and gives the number a gradient in the backward pass: the number is a
    term of the loss that appears in no sum.
    """
    return ((inner, name) for inner, name in _given_to_scripts(roots) if is_number(inner))


def _given_to_scripts(roots: Collection[Any]) -> Iterator[tuple[Any, str]]:
    for one in nodes_before(roots):
        if is_scripts(one) and not is_number(one):
            yield from ((inner, type(one).__name__) for inner, _ in one.next_functions)


def is_scripts(node: Any) -> bool:
    """Return whether a node belongs to an autograd function that a script defines."""
    return hasattr(type(node), "_forward_cls") and type(node).__name__ not in SAME_OUTPUTS
