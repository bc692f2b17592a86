"""The leaves that replace parameters, and the saved states of modules, in the replays before one optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.recording.flat_sharding import part_of
from plumbline.recording.sharding import gathered, is_run, whole
from plumbline.replay.call import TrackedCall
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.unsharding import computing_dtypes, is_gathered, shards


class ParameterCopies:
    """The leaves that replace the parameters in replays of one precision: float64 copies, or the same memory.

    A sharded parameter is gathered once, when it is first needed. ``keeps`` says whether the gradient of a parameter is
    needed. ``flat`` caches gathered flat parameters, for copies in several precisions.
    """

    def __init__(
        self,
        precision: ReplayPrecision,
        keeps: Callable[[Tensor], bool] = lambda parameter: True,
        flat: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.keeps = keeps
        self._flat = {} if flat is None else flat
        self.precision = precision
        self._copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states: dict[nn.Module, ModuleState] = {}

    def state(self, module: nn.Module) -> ModuleState:
        """Return the saved state of a module. Every replay restores it, so it is the same for all its calls."""
        if module not in self._states:
            self._states[module] = ModuleState(module)
        return self._states[module]

    def of(self, parameter: nn.Parameter, *, requires_grad: bool, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return the leaf for a parameter, always the same one; ``dtype`` is the one that the training computes in."""
        if id(parameter) not in self._copies:
            leaf = nn.Parameter(self._copy(self._values(parameter), dtype), requires_grad=False)
            if not is_gathered(parameter):
                vars(leaf).update(vars(parameter))
            self._copies[id(parameter)] = parameter, leaf
        leaf = self._copies[id(parameter)][1]
        leaf.requires_grad_(requires_grad)
        return leaf

    def _values(self, parameter: nn.Parameter) -> Tensor:
        if (part := part_of(parameter)) is None:
            return gathered(parameter) if is_run(parameter) else whole(parameter.detach())
        flat = part.unit.flat
        if id(flat) not in self._flat:
            self._flat[id(flat)] = flat, part.unit.weights()
        return part.take(self._flat[id(flat)][1])

    def _copy(self, values: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self.precision is ReplayPrecision.NATIVE:
            return values.to(dtype or values.dtype)
        return self.precision.copy(values)

    def leaves(self, call: TrackedCall) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
        """Return the parameters of a call with their leaves, by the identities of the tensors in the module."""
        dtypes = computing_dtypes(call.module)
        found = {}
        for one in call.parameters:
            leaf = self.of(one.parameter, requires_grad=one.requires_grad, dtype=dtypes.get(id(one.parameter)))
            found[id(one.parameter)] = one.parameter, leaf
        unsharded = {name: found[id(shard)] for name, shard in shards(call.module).items() if id(shard) in found}
        return {**found, **unsharded}


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
