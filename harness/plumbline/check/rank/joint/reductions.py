"""Finds parameters that a layer uses next after a reduction over ranks, such as the bias of a row-parallel layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plumbline.check.rank.joint.operator_watch import OperatorWatch
from plumbline.check.rank.joint.weights import JointWeights
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
        indices = [index for index, one in enumerate(running) if one.module is module]
        if indices:
            del running[indices[-1] :]

    def before(func: Any, arguments: list[Any]) -> None:
        if not running:
            return
        module = running[-1]
        if is_collective(func):
            module.has_reduced |= "reduce" in func._schema.name
        elif any(one.has_reduced for one in running):
            owners = map(weights.owner_of, tensors_in(arguments))
            used = {owner for owner in owners if owner is not None}
            if module.has_reduced and len(used) == 1:
                found.update(used)
            for one in running if used else ():
                one.has_reduced = False

    handles = [register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)]
    try:
        with OperatorWatch(before):
            yield found
    finally:
        for handle in handles:
            handle.remove()
