"""Notes a module's buffers when a training forward begins, and whether DistributedDataParallel broadcast them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.parallelism import ParallelismObserver, active_wrapper, world_size
from plumbline.check.rank.tensor_digest import readable_values, tensor_digest
from plumbline.recording.module_calls import running_modules
from plumbline.recording.observer import Observer

Statistics: Any = (torch.nn.modules.batchnorm._NormBase,)
"""Layers whose floating-point buffers are running statistics: a NaN in them never goes away."""


class BufferObserver(Observer):
    """Notes, for each backward pass, the buffers at each training forward before it: ``{"forwards": [...]}``.

    A forward has the digest and the norm of each buffer, and ``broadcast``: whether the DistributedDataParallel through
    which the module is called should have broadcast the buffers just before. A step has the running statistics that
    contain NaN.
    """

    name = "buffers"

    def __init__(self, parallelism: ParallelismObserver) -> None:
        self._parallelism = parallelism
        self._modules: list[nn.Module] = []
        self._forwards: list[Facts] = []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(known is module for known in self._modules):
            self._modules.append(module)
        if not module.training or world_size() == 1 or running_modules():
            return  # a module that contains this one was noted, and may have changed the buffers since
        wrapper = self._parallelism.wrapper_of(module)
        inner = getattr(wrapper, "module", module)
        broadcast = _broadcast(wrapper, module)
        buffers = dict(inner.named_buffers())
        if broadcast:  # only those that it knows: others may be left out on purpose, or be added later
            known = {id(buffer) for buffer in getattr(wrapper, "modules_buffers", ())}
            buffers = {name: value for name, value in buffers.items() if id(value) in known}
        if buffers:
            self._forwards.append(
                {
                    "module": next(i for i, known in enumerate(self._modules) if known is module),
                    "wrapped": wrapper is not None,
                    "broadcast": broadcast,
                    "buffers": {name: _noted(value) for name, value in buffers.items()},
                }
            )

    def backward_ends(self, number: int) -> Facts | None:
        forwards, self._forwards = self._forwards, []
        return {"forwards": forwards} if forwards else None

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return which running statistics of the called modules hold NaN."""
        names = [name for module in self._modules for name in _not_a_number(module)]
        return {"nan": names} if self._modules else None

    def stop(self) -> None:
        self._modules, self._forwards = [], []


def _broadcast(wrapper: Any, module: nn.Module) -> bool:
    """Return whether the wrapper broadcast buffers before it called the module.

    It does so before the first forward, and before each forward after one whose gradients are reduced. What a hook of
    the script does instead is not known.
    """
    if wrapper is None or wrapper is module or hasattr(wrapper, "buffer_hook"):
        return False
    # A private name: if a version of torch lacks it, no broadcast is expected.
    synchronises = bool(getattr(wrapper, "require_forward_param_sync", False))
    return active_wrapper() is wrapper and bool(wrapper.broadcast_buffers) and synchronises


def _noted(buffer: Tensor) -> list[Any]:
    """Return a buffer's digest and its norm, None where it has no finite one."""
    values = readable_values(buffer)
    if values is None or not values.is_floating_point():
        return [tensor_digest(buffer), None]
    norm = float(torch.linalg.vector_norm(values.float()))
    return [tensor_digest(buffer), norm if math.isfinite(norm) else None]


def _not_a_number(module: nn.Module) -> list[str]:
    return [
        f"{name}.{own}" if name else own
        for name, part in module.named_modules()
        if isinstance(part, Statistics)
        for own, buffer in part.named_buffers(recurse=False)
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any())
    ]
