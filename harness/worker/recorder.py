"""Takes down what happens on a rank while somebody else's code trains. It never judges.

Nothing is asked of the subject: evidence comes from the global optimizer-step hooks, a pre-hook on the job's model,
the job's loss, and the GradScaler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.core.trace import MicroBatch, Step, Tensors


class Recorder:
    """Collects the steps of this process. ``install`` hooks it into torch for the rest of the process's life."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.world_size = 1
        self._model: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._forwards: list[tuple[int, tuple[int, ...]]] = []
        self._micro_batches: list[MicroBatch] = []
        self._before: Tensors = {}
        self._gradients: Tensors = {}
        self._scale: float | None = None
        self._buffers: Tensors = {}

    def install(self) -> None:
        """Hook into torch's optimizers and GradScaler."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_scaler(torch.amp.GradScaler)

    def watch(self, model: nn.Module) -> None:
        """Follow ``model``: its parameters by name, and the samples that go through its forward."""
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def on_loss(self, batch: Any) -> None:
        """Take down that the job's loss saw ``batch``: it closes a micro-batch."""
        if torch.is_grad_enabled():
            self._close_micro_batch(_ids(batch))

    def note_world(self) -> None:
        """Take down how many ranks torch.distributed connects, if it connects any at this moment."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Without gradients it is validation; inside a backward it is an activation being recomputed.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        for value in (*args, *kwargs.values()):
            ids = _ids(value)
            if ids is not None:
                if not self._forwards and not self._micro_batches:
                    self._buffers = {name: _copy(buffer) for name, buffer in module.named_buffers()}
                device = value["index"].device.index or 0
                self._forwards.append((device, ids))
                return

    def _close_micro_batch(self, loss: tuple[int, ...] | None) -> None:
        # Replicas on CUDA run in threads, in any order: the contract's order is that of the devices.
        forwards = tuple(ids for _, ids in sorted(self._forwards, key=lambda forward: forward[0]))
        self._forwards = []
        self._micro_batches.append(MicroBatch(forwards, loss))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weights = self._weights()
        if self.steps and _equal(weights, self.steps[-1].after):
            weights = self.steps[-1].after
        self._before = weights
        self._gradients = self._handed(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._append(optimizer, self._before, self._gradients, self._weights(), skipped=False)

    def _append(
        self, optimizer: Optimizer, before: Tensors, gradients: Tensors, after: Tensors, *, skipped: bool
    ) -> None:
        for _, ids in self._forwards:
            # No loss of the job's closed these: each forward is a micro-batch of its own.
            self._micro_batches.append(MicroBatch((ids,)))
        self._forwards = []
        # Asked at every step: the group may be gone by the time the subject returns.
        self.note_world()
        self.steps.append(
            Step(
                micro_batches=tuple(self._micro_batches),
                before=before,
                gradients=gradients,
                after=after,
                learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
                skipped=skipped,
                scale=self._scale,
                buffers=self._buffers,
            )
        )
        self._micro_batches = []

    def final(self) -> Tensors | None:
        """Return the model's weights as they are now: the last step's own object where they are the same."""
        if self._model is None:
            return None
        weights = self._weights()
        return self.steps[-1].after if self.steps and _equal(weights, self.steps[-1].after) else weights

    def _watch_scaler(self, scaler_class: Any) -> None:
        step = scaler_class.step
        recorder = self

        def recorded(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return step(scaler, optimizer, *args, **kwargs)
            recorder._scale = scaler.get_scale()
            count = len(recorder.steps)
            result = step(scaler, optimizer, *args, **kwargs)
            if len(recorder.steps) == count:
                weights = recorder._weights()
                before = recorder.steps[-1].after if recorder.steps else weights
                if _equal(weights, before):
                    weights = before
                gradients = recorder._handed(optimizer)
                recorder._append(optimizer, before, gradients, weights, skipped=True)
            return result

        scaler_class.step = recorded

    def _weights(self) -> Tensors:
        if self._model is None:
            return {}
        return {name: _copy(parameter) for name, parameter in self._model.named_parameters()}

    def _handed(self, optimizer: Optimizer) -> Tensors:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [self._names.get(id(p)) for p in parameters]
        if not any(names) and self._model is not None:
            # Master weights: other tensors, handed over in the model's own order.
            own = list(self._model.named_parameters())
            if [p.shape for p in parameters] == [p.shape for _, p in own]:
                names = [name for name, _ in own]
        return {
            name: _copy(parameter.grad)
            for name, parameter in zip(names, parameters, strict=True)
            if name is not None and parameter.grad is not None
        }


def _ids(batch: Any) -> tuple[int, ...] | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("index"), Tensor):
        return tuple(batch["index"].reshape(-1).tolist())
    return None


def _copy(tensor: Tensor) -> Tensor:
    # A clone: gradients may be views into DDP's buckets, which the next step overwrites.
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to("cpu", copy=True)


def _equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
