"""Notes the precision in which a training really computes: dtypes, autocast, flags for matrix products, comm hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.devices.calls import started_types
from plumbline.evidence.rank_file import dtype_name
from plumbline.recording.observer import WrappingObserver
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import wrap


class PrecisionUsed(WrappingObserver):
    """Notes the settings that are in force, and changes none.

    Facts of a step: ``parameters`` and ``gradients``: numbers of entries by dtype; ``devices``: the parameters' device
    types. ``autocast``: how often autocast was entered with gradients enabled since any optimizer's last step, by
    device and dtype (``off`` if it was entered to disable it).
    Facts of a backward pass: ``autocast``: the dtypes in force when it began, although it should run outside autocast.
    Facts of the process: ``flags`` of torch, and ``hooks``: names of communication hooks of DistributedDataParallel.
    """

    name = "precision"

    def __init__(self) -> None:
        super().__init__()
        self._entered: Counter[str] = Counter()
        self._in_backward: list[str] = []
        self._hooks: list[str] = []

    def install(self) -> None:
        wrap(torch.amp.autocast, "__enter__", self._around_enter)
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            wrap(DistributedDataParallel, name, self._around_register)

    def found(self, one: Any) -> None:
        # A private name: if this version of torch lacks it, the hooks of existing wrappers are unknown.
        if isinstance(one, DistributedDataParallel):
            self._hooks += [_name(hook) for hook, _ in getattr(one, "_comm_hooks", ())]

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        kinds = dict.fromkeys(("cpu", *(("cuda",) if torch.cuda.is_available() else ()), *started_types()))
        self._in_backward = [
            f"{kind} {dtype_name(torch.get_autocast_dtype(kind))}" for kind in kinds if torch.is_autocast_enabled(kind)
        ]

    def backward_ends(self, number: int) -> Facts | None:
        return {"autocast": self._in_backward}

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        entered, self._entered = self._entered, Counter()
        weights: Counter[str] = Counter()
        gradients: Counter[str] = Counter()
        devices = set()
        for parameter in parameters_of(optimizer):
            weights[dtype_name(parameter.dtype)] += parameter.numel()
            devices.add(parameter.device.type)
            if parameter.grad is not None:
                gradients[dtype_name(parameter.grad.dtype)] += parameter.numel()
        return {
            "parameters": dict(weights),
            "gradients": dict(gradients),
            "devices": sorted(devices),
            "autocast": dict(entered),
        }

    def final_facts(self) -> Facts | None:
        return {"flags": _flags(), "hooks": self._hooks, "error": self.error}

    def _around_enter(self, original: Callable[..., Any], context: Any) -> Any:
        if self.attends and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with self.notes():
                dtype = dtype_name(context.fast_dtype) if context._enabled else "off"
                self._entered[f"{context.device} {dtype}"] += 1
        return original(context)

    def _around_register(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with self.notes():
            self._hooks.append(_name(kwargs.get("hook", kwargs.get("comm_hook_type", args[-1]))))
        return result


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", hook))


def _flags() -> Facts:
    """Return torch's precision flags. The older name can raise once the script has used the newer one."""
    try:
        return {"matmul": torch.get_float32_matmul_precision()}
    except RuntimeError:
        return {"matmul": getattr(torch.backends.cuda.matmul, "fp32_precision", None)}
