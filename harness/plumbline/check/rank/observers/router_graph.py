"""Reads from the graph which scores experts are selected by, and which numbers depend on such scores alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from plumbline.check.rank.observers.loss_weight import SAME_OUTPUTS, SAME_VALUES, UnknownWeightError, constant_of

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
    if name in SAME_VALUES and _is_number(node) and _is_number(following[0][0]):
        return [term.inner(following[0])]
    if name in ("AddBackward0", "SubBackward0") and _is_number(node):
        alpha = float(node._saved_alpha) * (-1 if name == "SubBackward0" else 1)
        second = () if alpha == 1 else ((id(node), alpha),)
        return [term.inner(following[0]), term.inner(following[1], *second)]
    if not _is_number(node):
        return None
    try:
        constant = constant_of(node, name)
    except (UnknownWeightError, AttributeError):
        return None
    if constant is None:
        return None
    place = next((one for one in following if one[0] is not None), (None, 0))
    return [term.inner(place, (id(node), constant))]


def _is_number(node: Any) -> bool:
    shapes = [tuple(one.shape) for one in getattr(node, "_input_metadata", ())]
    return len(shapes) == 1 and all(size == 1 for size in shapes[0])


def only_from(node: Any, scores: Collection[int]) -> bool:
    """Return whether a number depends on these scores, and on weights only through them."""
    waiting, seen, is_reached = [node], set[int](), False
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if id(one) in scores:
            is_reached = True
        elif hasattr(one, "variable") or _has_labels(one):
            return False
        else:
            waiting.extend(inner for inner, _ in one.next_functions)
    return is_reached


def nodes_reached(roots: Collection[Any]) -> dict[int, Any]:
    """Return, by id, the nodes that a gradient from these roots reaches."""
    waiting, reached = list(roots), dict[int, Any]()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in reached:
            reached[id(one)] = one
            waiting.extend(inner for inner, _ in one.next_functions)
    return reached


def _has_labels(node: Any) -> bool:
    target = getattr(node, "_saved_target", None)
    return target is not None and not target.is_floating_point()


def attached_numbers(roots: Collection[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of numbers to which functions that a script defines pass gradients, with the functions' names.

    Such a function returns a tensor as it is, and gives the number a gradient in the backward pass: the number is a
    term of the loss that appears in no sum.
    """
    waiting, seen = list(roots), set[int]()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        following = one.next_functions
        if is_scripts(one) and not _is_number(one):
            yield from ((inner, type(one).__name__) for inner, _ in following if _is_number(inner))
        waiting.extend(inner for inner, _ in following)


def is_scripts(node: Any) -> bool:
    """Return whether a node belongs to an autograd function that a script defines."""
    return hasattr(type(node), "_forward_cls") and type(node).__name__ not in SAME_OUTPUTS
