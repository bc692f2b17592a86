"""Finds what an autograd graph uses and does by walking it, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        nodes = list(_walk(outputs, into_calls=True))
        return cls(
            tuple(node.variable for node in nodes if hasattr(node, "variable")),
            any(isinstance(node, BackwardCFunction) for node in nodes),
            any("CheckpointFunction" in type(node).__name__ for node in nodes),
        )


def runs_own_code(outputs: Iterable[Tensor]) -> bool:
    """Return whether a backward pass from these tensors runs custom functions in Python, apart from the recorder's."""
    nodes = _walk(outputs, into_calls=True)
    return any(isinstance(node, BackwardCFunction) and not isinstance(node, _CALL) for node in nodes)


def used_outside(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a gradient of ``outputs`` reaches without passing through the inside of a tracked call."""
    return [node.variable for node in _walk(outputs, into_calls=False) if hasattr(node, "variable")]


def received_leaf(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor that requires a gradient is, or is a copy of; None for parameters and others."""
    leaf = tensor
    for node in _walk([tensor], into_calls=True):
        if hasattr(node, "variable"):
            leaf = node.variable
        elif type(node).__name__ not in COPIES:
            return None
    return None if isinstance(leaf, nn.Parameter) else leaf


def _walk(outputs: Iterable[Tensor], *, into_calls: bool) -> Iterator[Any]:
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen: dict[int, Any] = {}  # keeps the nodes alive, so that their ids stay unique
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        if isinstance(node, _CALL) and not into_calls and not node.call.discarded:
            waiting.extend(node.arguments)
        else:
            waiting.extend(following for following, _ in node.next_functions)
