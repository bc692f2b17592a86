"""Which parameters a graph uses: found by walking it, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from harness.check.rank.alias import CallOutputs

_CALL: Any = CallOutputs._backward_cls


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a gradient of ``outputs`` reaches."""
    return [node.variable for node in _walk(outputs, into_calls=True) if hasattr(node, "variable")]


def used_outside(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a gradient of ``outputs`` reaches on a way that is not through a tracked call."""
    return [node.variable for node in _walk(outputs, into_calls=False) if hasattr(node, "variable")]


def is_reentrant(outputs: Iterable[Tensor]) -> bool:
    """Return whether a checkpoint is in the graph that cannot be differentiated for chosen inputs only."""
    return any("CheckpointFunction" in type(node).__name__ for node in _walk(outputs, into_calls=True))


def _walk(outputs: Iterable[Tensor], *, into_calls: bool) -> Iterator[Any]:
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen: dict[int, Any] = {}  # holds the nodes, since another could get the identity of one that is gone
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
