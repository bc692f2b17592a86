"""Notes losses that a model computes in addition to its output, and whether a backward pass uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames
from plumbline.recording.patching import attempt
from plumbline.replay.alias import CallOutputs
from plumbline.replay.uses import inputs_of, nodes_before

_WORDS = ("aux", "loss", "penalty")
_MAIN = ("loss", "losses", "total_loss")
"""A model's own loss: a script may compute another one in its place."""

_CALL: Any = CallOutputs._backward_cls
_SINK = "_DDPSinkBackward"


class UnusedLossObserver(Observer):
    """Looks at the numbers with a graph that modules hold or that calls have returned, when a backward pass begins.

    A number counts if an attribute or a field names it as a loss, or if it follows the first item of a returned tuple.
    A number that a loss function of torch computes from labels does not count: it is a main loss, and a script may
    compute another one in its place. A number without a name does not count if it is computed from any targets. Facts
    of the process: ``used`` and ``unused``, the names of numbers; a name may be in both.
    """

    name = "unused-losses"

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._used: set[str] = set()
        self._unused: set[str] = set()

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        attempt(self._look, roots)

    def final_facts(self) -> Facts | None:
        return {"used": sorted(self._used), "unused": sorted(self._unused)} if self._used or self._unused else None

    def _look(self, roots: Sequence[Tensor]) -> None:
        held = list(held_losses(self._names.roots))
        reached, calls = _reached([one.grad_fn for one in roots if one.grad_fn is not None])
        known = {id(node) for _, node in held}
        returned = [(name, node) for call in calls for name, node in _returned(call) if id(node) not in known]
        for name, node in [*held, *returned]:
            (self._used if _is_used(node, reached) else self._unused).add(name)


def held_losses(roots: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the names and nodes of numbers that modules hold in attributes named as a loss."""
    for root in roots:
        for path, module in root.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                if is_auxiliary(name):
                    for one in _parts(value):
                        if isinstance(one, Tensor) and one.numel() == 1 and not _has_labels(one.grad_fn):
                            yield f"{path}.{name}" if path else f"{type(root).__name__}.{name}", one.grad_fn


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


def _returned(call: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a call has returned: their names, and their nodes."""
    for place, name in call.call.scalars.items():
        node = call.next_functions[place][0]
        if isinstance(name, int):
            if name > 0 and not any(_targets(node)):
                yield f"output {name} of {call.call.name}", node
        elif is_auxiliary(name) and not _has_labels(node):
            yield f"{name} in the output of {call.call.name}", node


@cache
def is_auxiliary(name: str) -> bool:
    return name not in _MAIN and any(word in name.lower() for word in _WORDS)


def _has_labels(node: Any) -> bool:
    """Return whether a number is computed from labels; True also if its computation is unknown."""
    return node is None or any(not target.is_floating_point() for (target,) in _targets(node))


def _targets(node: Any) -> Iterator[tuple[Tensor]]:
    """Yield the targets of torch's loss functions that compute a number, or terms or factors of it."""
    for one in _numbers(node):
        if hasattr(one, "_saved_target"):
            yield (one._saved_target,)


def _is_used(node: Any, reached: dict[int, Any]) -> bool:
    """Return whether a node, or one that its number is computed from, is reached: a number for logs is no loss."""
    return id(node) in reached or any(id(one) in reached for one in _numbers(node))


def _numbers(node: Any) -> Iterator[Any]:
    """Yield a node and those before it, as long as each makes a single number."""
    return filter(is_number, nodes_before([node], lambda one: inputs_of(one) if is_number(one) else ()))


def is_number(node: Any) -> bool:
    shapes = [tuple(one.shape) for one in getattr(node, "_input_metadata", ())]
    return len(shapes) == 1 and torch.Size(shapes[0]).numel() == 1


def _reached(nodes: Iterable[Any]) -> tuple[dict[int, Any], list[Any]]:
    """Return, by id, the nodes that a gradient reaches, and those of them that end tracked calls.

    A gradient at one output of a call reaches only what is computed into this output.
    """
    waiting = [(node, 0) for node in nodes]
    reached: dict[int, Any] = {}
    seen: set[tuple[int, int]] = set()
    calls: list[Any] = []
    while waiting:
        node, output = waiting.pop()
        if node is None:
            continue
        by_output = isinstance(node, _CALL) or type(node).__name__ == _SINK
        key = (id(node), output if by_output else 0)
        if key in seen:
            continue
        seen.add(key)
        if isinstance(node, _CALL) and id(node) not in reached:
            calls.append(node)
        reached[id(node)] = node
        following = node.next_functions
        waiting.extend([following[output]] if by_output else following)
    return reached, calls
