"""Finds parameters that a layer uses next after a reduction over ranks, such as the bias of a row-parallel layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.check.rank.joint.weights import JointWeights
from plumbline.recording.sharding import dtensors
from plumbline.replay.collectives import is_collective
from plumbline.replay.nested import tensors_in


@dataclass
class _Running:
    """A module whose forward runs; ``has_reduced``: ranks reduced a tensor in it, and it has used no weight since."""

    module: nn.Module
    has_reduced: bool = False


@contextmanager
def used_after_reductions(weights: JointWeights) -> Iterator[set[int]]:
    """Collect the ids of parameters that a forward at these weights uses next after a reduction in the same module.

    Such a parameter is no part of what was reduced: every rank adds, or multiplies by, the whole parameter.
    """
    running: list[_Running] = []
    found: set[int] = set()

    def begins(module: nn.Module, args: Any) -> None:
        running.append(_Running(module))

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        places = [place for place, one in enumerate(running) if one.module is module]
        if places:
            del running[places[-1] :]

    handles = [register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)]
    try:
        with _Uses(weights, running, found):
            yield found
    finally:
        for handle in handles:
            handle.remove()


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, weights: JointWeights, running: list[_Running], found: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._running = running
        self._found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, dtensors().DTensor) for one in types):
            return NotImplemented
        if self._running:
            self._note(func, [*tensors_in(args), *tensors_in(kwargs or {})])
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, given: list[Tensor]) -> None:
        module = self._running[-1]
        if is_collective(func):
            module.has_reduced |= "reduce" in func._schema.name
        elif any(one.has_reduced for one in self._running):
            used = {owner for one in given if (owner := self._weights.owner_of(one)) is not None}
            if module.has_reduced and len(used) == 1:
                self._found |= used
            for one in self._running if used else ():
                one.has_reduced = False
