"""Measures what recording costs on this rank, for ``--dry-run``. Nothing is replayed."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from plumbline.check.evidence.training import Facts
from plumbline.devices.calls import synchronize_started
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.pause import is_paused, paused
from plumbline.replay.nested import tensors_in

_SIZE = 512
"""Rows of the square matrices whose product is timed."""


class RecordingCost(Observer):
    """Times the first optimizer's steps: the last one before recording begins, and the recorded one.

    It also counts the bytes of the parameters, of the inputs of forwards, and of what the largest forward saves for its
    backward pass.
    """

    name = "cost"
    essential = True

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._timed: Optimizer | None = None
        self._handle: Any = None
        self._hooks: Any = None
        self._facts: Facts = {}
        self._inputs = 0
        self._saved: dict[int, int] = {}
        self._most_saved = 0
        self._dtype: torch.dtype | None = None

    def install(self) -> None:
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def start(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._close_forward()
        tensors = list(tensors_in((args, kwargs)))
        self._inputs += sum(one.numel() * one.element_size() for one in tensors)
        kind = next((one.device.type for one in (*tensors, *module.parameters())), "cpu")
        self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def before_step(self, optimizer: Optimizer) -> None:
        self._close_forward()
        parameters = parameters_of(optimizer)
        if optimizer is not self._timed or not parameters:
            return
        largest = max(parameters, key=Tensor.numel)
        with paused():
            ratio = _float64_ratio(self._dtype or largest.dtype, largest.device)
        self._facts = {
            "parameters": sum(one.numel() for one in parameters),
            "parameter_bytes": sum(one.numel() * one.element_size() for one in parameters),
            "input_bytes": self._inputs,
            "saved_bytes": self._most_saved * 8 // (self._dtype or largest.dtype).itemsize,
            "float64_ratio": ratio,
        }

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        if optimizer is self._timed and len(self._ends) > 1:
            now = _now()
            self._facts |= {"plain_s": self._ends[-1] - self._ends[-2], "recorded_s": now - self._ends[-1]}
        return None

    def stop(self) -> None:
        self._handle.remove()
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def final_facts(self) -> Facts | None:
        return self._facts if "plain_s" in self._facts else None

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_paused():
            return
        self._timed = self._timed or optimizer
        if optimizer is self._timed:
            self._ends.append(_now())

    def _save(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            self._saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    def _close_forward(self) -> None:
        self._most_saved = max(self._most_saved, sum(self._saved.values()))
        self._saved.clear()


def _now() -> float:
    synchronize_started()
    return time.monotonic()


def _float64_ratio(dtype: torch.dtype, device: torch.device) -> float:
    return max(1.0, _product_s(torch.float64, device) / _product_s(dtype, device))


def _product_s(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    times = []
    for _ in range(5):
        begun = _now()
        torch.mm(matrix, matrix)
        times.append(_now() - begun)
    return max(min(times), 1e-9)
