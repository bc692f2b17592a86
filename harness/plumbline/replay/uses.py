"""Finds what an autograd graph uses and does by walking it, without running it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from plumbline.replay.alias import CallOutputs

_CALL: Any = CallOutputs._backward_cls

COPIES = frozenset({"CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0"})
"""Nodes whose output has the values of their input."""


@dataclass(frozen=True)
class Graph:
    """The autograd graph of some tensors.

    ``leaves`` are its leaf tensors. ``runs_code``: its backward pass runs custom autograd functions in Python.
    ``is_reentrant``: it has a checkpoint that runs a backward pass inside of the backward pass.
    """

    leaves: tuple[Tensor, ...]
    runs_code: bool
    is_reentrant: bool

    @classmethod
    def of(cls, outputs: Iterable[Tensor]) -> Graph:
        nodes = list(nodes_of(outputs))
        return cls(
            tuple(node.variable for node in nodes if hasattr(node, "variable")),
            any(isinstance(node, BackwardCFunction) for node in nodes),
            any("CheckpointFunction" in type(node).__name__ for node in nodes),
        )


def runs_own_code(outputs: Iterable[Tensor]) -> bool:
    """Return whether a backward pass from these tensors runs custom functions in Python, apart from the recorder's."""
    return any(isinstance(node, BackwardCFunction) and not isinstance(node, _CALL) for node in nodes_of(outputs))


def used_outside(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a gradient of ``outputs`` reaches without passing through the inside of a tracked call."""
    return [node.variable for node in nodes_of(outputs, _around_calls) if hasattr(node, "variable")]


def received_leaf(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor that requires a gradient is, or is a copy of; None for parameters and others."""
    leaf = tensor
    for node in nodes_of([tensor]):
        if hasattr(node, "variable"):
            leaf = node.variable
        elif type(node).__name__ not in COPIES:
            return None
    return None if isinstance(leaf, nn.Parameter) else leaf


def inputs_of(node: Any) -> Iterator[Any]:
    """Return the nodes that a node gives gradients to, None for inputs without a gradient."""
    return (one for one, _ in node.next_functions)


def _around_calls(node: Any) -> Iterable[Any]:
    return node.arguments if isinstance(node, _CALL) and not node.call.discarded else inputs_of(node)


def nodes_of(outputs: Iterable[Tensor], inputs: Callable[[Any], Iterable[Any]] = inputs_of) -> Iterator[Any]:
    """Yield the nodes of the graph of some tensors, as ``nodes_before`` does."""
    return nodes_before((one.grad_fn for one in outputs), inputs)


def nodes_before(
    roots: Iterable[Any], inputs: Callable[[Any], Iterable[Any]] = inputs_of, *, nearest_first: bool = False
) -> Iterator[Any]:
    """Yield the nodes of a graph from these on, each once; those before a node are what ``inputs`` returns for it."""
    waiting = deque(roots)
    seen: dict[int, Any] = {}  # keeps the nodes alive, so that their ids stay unique
    while waiting:
        node = waiting.popleft() if nearest_first else waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            yield node
            waiting.extend(inputs(node))
