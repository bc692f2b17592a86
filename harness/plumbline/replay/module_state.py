"""Saves the attributes of a module and its submodules, exchanges them for a replay, and restores them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Replace = Callable[[Tensor], Tensor]

_DEEPEST = 4


class ModuleState:
    """A snapshot of the attributes of a module and its submodules, and of the lists, dicts and sets in them.

    ``exchange`` replaces the tensors there, including those in parameter and buffer tables and in lists of weights,
    such as a recurrent layer's; ``restore`` undoes all changes. Containers keep their identity, so closures and hooks
    that share one see the same contents. A dict without tensors is only read: its class may forbid changes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        for one in module.modules():
            self._attributes.append((vars(one), dict(vars(one))))
            for name, value in vars(one).items():
                if name != "_modules":
                    self._keep(value, 0)

    def _keep(self, value: Any, depth: int) -> None:
        if not isinstance(value, (list, dict, set, deque)) or id(value) in self._containers or depth > _DEEPEST:
            return
        # A dict is copied to a plain dict: a subclass may need more than its entries.
        self._containers[id(value)] = value, dict(value.items()) if isinstance(value, dict) else value.copy()
        for part in value.values() if isinstance(value, dict) else value:
            self._keep(part, depth + 1)

    def exchange(self, replace: Replace) -> None:
        """Replace every tensor in the attributes and their containers; a tensor has the same replacement everywhere."""
        known: dict[int, Tensor] = {}

        def new(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in known:
                    known[id(value)] = replace(value)
                return known[id(value)]
            if type(value) is tuple and any(isinstance(part, Tensor) for part in value):
                return tuple(new(part) for part in value)
            return value

        for attributes, saved in self._attributes:
            attributes.update({name: new(value) for name, value in saved.items()})
        for container, saved_content in self._containers.values():
            if isinstance(container, dict):
                entries = {name: new(value) for name, value in saved_content.items()}
                if any(name not in container or container[name] is not entries[name] for name in entries):
                    container.update(entries)
            elif isinstance(container, (list, deque)):
                for index, value in enumerate(saved_content):
                    container[index] = new(value)

    def restore(self) -> None:
        """Restore the attributes and the contents of their containers."""
        for container, content in self._containers.values():
            if isinstance(container, dict) and _parts(container) == _parts(content):
                continue
            if isinstance(container, list):
                container[:] = content
                continue
            container.clear()
            (container.extend if isinstance(container, deque) else container.update)(content)
        for attributes, saved in self._attributes:
            if attributes.keys() != saved.keys():
                attributes.clear()
            attributes.update(saved)


def _parts(container: dict[Any, Any]) -> list[int]:
    return [id(part) for part in (*container.keys(), *container.values())]
