"""Counts the floating-point operations and the bytes of tensors of one step, which is not timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from plumbline.recording.parameters import parameters_of


class _NoModules:
    """Replaces the counter's tracking of modules, whose hooks break a backward pass that is split in two.

    Pipelines split it to defer the gradients of weights (torch 2.13).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class ExecutedFlops:
    """Counts operations between ``start`` and ``stop``, which surround one step.

    Matrix products, convolutions and attention count; a multiplication with its addition is two operations. Repeated
    work, as with activation checkpointing, counts each time. ``total`` stays None for a process with several devices,
    whose threads the counter does not follow.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.total: int | None = None
        self._counter: Any = None
        if len(devices) == 1:
            self._counter = FlopCounterMode(display=False)
            self._counter.mod_tracker = _NoModules()

    def start(self) -> None:
        if self._counter is not None:
            self._counter.__enter__()

    def stop(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.total = int(self._counter.get_total_flops())


class TensorBytes:
    """Counts bytes between ``start`` and ``stop``, which surround one step; ``by_metric`` then has them.

    Activations are the tensors that autograd saves for the backward pass, apart from the model's tensors and the batch.
    ``workload`` is the class with the job's ``loss``, whose saved tensors count too.
    """

    def __init__(self, workload: Any) -> None:
        self.by_metric: dict[str, int] = {}
        self._workload = workload
        self._loss = workload.loss
        self._model: nn.Module | None = None
        self._handles: list[Any] = []
        self._kept: dict[int, int] = {}
        self._not_counted: set[int] = set()

    def watch(self, model: nn.Module) -> None:
        self._model = model

    def start(self) -> None:
        if self._model is None:
            return
        entered: list[saved_tensors_hooks] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            # The weights of a replica are copies that are not parameters.
            self._leave_out([vars(layer) for layer in module.modules()], args, kwargs)
            entered.append(self._keeping())
            entered[-1].__enter__()

        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            entered.pop().__exit__()

        def loss(workload: Any, outputs: Any, batch: Any) -> Tensor:
            self._leave_out(batch)
            with self._keeping():
                result: Tensor = self._loss(workload, outputs, batch)
                return result

        self._handles = [
            self._model.register_forward_pre_hook(enter, with_kwargs=True),
            self._model.register_forward_hook(leave, always_call=True),
        ]
        self._workload.loss = loss

    def stop(self, optimizer: Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        self._workload.loss = self._loss
        if self._model is None:
            return
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        self.by_metric = {
            "tensors_parameters": _bytes(self._model.parameters()),
            "tensors_gradients": _bytes(gradients),
            "tensors_optimizer": _bytes(_tensors(dict(optimizer.state))),
            "tensors_activations": sum(self._kept.values()),
        }

    def _keeping(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _own(tensor).untyped_storage()
        if storage.data_ptr() not in self._not_counted:
            self._kept[storage.data_ptr()] = storage.nbytes()  # views of one storage count once
        return tensor

    def _leave_out(self, *values: Any) -> None:
        self._not_counted.update(tensor.untyped_storage().data_ptr() for tensor in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (_own(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    own = map(_own, tensors)
    # By address, so that shared tensors count once.
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in own}.values())


def _own(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)
