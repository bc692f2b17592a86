"""Takes down what happens on a rank while somebody else's code trains. It never judges.

Nothing is asked of the subject: evidence comes from the global optimizer-step hooks, hooks on the job's model,
the job's loss, and the GradScaler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.core.trace import Evaluation, Logged, MicroBatch, RankTrace, Step, Tensors


@dataclass
class _Forward:
    """One training forward of one device: its sample ids, and what its layers drew."""

    device: int
    ids: tuple[int, ...]
    drawn: Tensors = field(default_factory=dict)


class Recorder:
    """Collects the steps of this process. ``install`` hooks it into torch for the rest of the process's life."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.logged: list[Logged] = []
        self.world_size = 1
        self._model: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._forwards: list[_Forward] = []
        self._micro_batches: list[MicroBatch] = []
        self._before: Tensors = {}
        self._gradients: Tensors = {}
        self._scale: float | None = None
        self._buffers: Tensors = {}
        self._nested = 0
        self._stepped: set[int] = set()

    def install(self) -> None:
        """Hook into torch's optimizers and GradScaler."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_scaler(torch.amp.GradScaler)

    def watch(self, model: nn.Module) -> None:
        """Follow ``model``: its parameters by name, the samples that go through its forward, and what it draws."""
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        for layer in model.modules():
            if getattr(layer, "draws", None):
                layer.register_forward_hook(lambda layer, args, drawn: self._on_draw(layer.draws, drawn))

    def on_loss(self, batch: Any) -> None:
        """Take down that the job's loss saw ``batch``: it closes a micro-batch."""
        if torch.is_grad_enabled():
            self._close_micro_batch(_ids(batch))

    def on_log(self, name: str, value: Any) -> None:
        """Take down a metric that the subject reports."""
        self.logged.append(Logged(len(self.steps), name, float(value)))

    def trace(self, rank: int, error: str | None, failed_at: float | None) -> RankTrace:
        """Return all that was taken down, now that training is over."""
        self._note_world()
        buffers = {} if self._model is None else {name: _copy(value) for name, value in self._model.named_buffers()}
        return RankTrace(
            rank=rank,
            world_size=self.world_size,
            steps=tuple(self.steps),
            error=error,
            failed_at=failed_at,
            final=self._final(),
            final_buffers=buffers,
            evaluations=tuple(self.evaluations),
            logged=tuple(self.logged),
        )

    def _note_world(self) -> None:
        """Take down how many ranks torch.distributed connects, if it connects any at this moment."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _recomputes():
            return
        batch = next((value for value in (*args, *kwargs.values()) if _ids(value) is not None), None)
        if batch is None:
            return
        ids = _ids(batch) or ()
        if not torch.is_grad_enabled():
            self._evaluated(ids, module.training)
            return
        if not self._forwards and not self._micro_batches:
            self._buffers = {name: _copy(buffer) for name, buffer in module.named_buffers()}
        self._forwards.append(_Forward(batch["index"].device.index or 0, ids))

    def _evaluated(self, ids: tuple[int, ...], training: bool) -> None:
        place = (len(self.steps), len(self._micro_batches))
        last = self.evaluations[-1] if self.evaluations else None
        if last is not None and (last.step, last.micro_batches) == place and not self._forwards:
            self.evaluations[-1] = replace(last, samples=last.samples + ids, training=last.training or training)
        else:
            self.evaluations.append(Evaluation(*place, ids, training))

    def _on_draw(self, name: str, drawn: Tensor) -> None:
        if _recomputes() or not torch.is_grad_enabled():
            return
        # Replicas on CUDA run in threads: what was drawn belongs to the last forward of its own device.
        device = drawn.device.index or 0
        forward = next((forward for forward in reversed(self._forwards) if forward.device == device), None)
        if forward is not None:
            forward.drawn[name] = _copy(drawn)

    def _close_micro_batch(self, loss: tuple[int, ...] | None) -> None:
        # Replicas on CUDA run in threads, in any order: the contract's order is that of the devices.
        self._micro_batches.append(_micro_batch(sorted(self._forwards, key=lambda forward: forward.device), loss))
        self._forwards = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nested += 1
        if self._nested > 1:
            return  # an optimizer inside of an optimizer: the outer one's step is what the subject asked for
        weights = self._weights()
        if self.steps and _equal(weights, self.steps[-1].after):
            weights = self.steps[-1].after
        self._before = weights
        self._gradients = self._handed(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nested -= 1
        if self._nested == 0:
            self._append(optimizer, self._before, self._gradients, self._weights(), skipped=False)

    def _append(
        self, optimizer: Optimizer, before: Tensors, gradients: Tensors, after: Tensors, *, skipped: bool
    ) -> None:
        # Without a loss of the job's, each forward is a micro-batch of its own.
        self._micro_batches += [_micro_batch([forward], None) for forward in self._forwards]
        self._forwards = []
        # Asked at every step: the group may be gone by the time the subject returns.
        self._note_world()
        step = Step(
            micro_batches=tuple(self._micro_batches),
            before=before,
            gradients=gradients,
            after=after,
            learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            skipped=skipped,
            scale=self._scale,
            buffers=self._buffers,
        )
        self._micro_batches = []
        if self.steps and not step.micro_batches and self._is_another(optimizer, gradients):
            # One of several optimizers, each with its own part of the model: they make one step.
            self.steps[-1] = _together(self.steps[-1], step)
        else:
            self.steps.append(step)
            self._stepped = set()
        self._stepped.add(id(optimizer))

    def _is_another(self, optimizer: Optimizer, gradients: Tensors) -> bool:
        return id(optimizer) not in self._stepped and not gradients.keys() & self.steps[-1].gradients.keys()

    def _final(self) -> Tensors | None:
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
            last = recorder.steps[-1] if recorder.steps else None
            result = step(scaler, optimizer, *args, **kwargs)
            if (recorder.steps[-1] if recorder.steps else None) is last:
                weights = recorder._weights()
                before = last.after if last else weights
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


def _micro_batch(forwards: list[_Forward], loss: tuple[int, ...] | None) -> MicroBatch:
    names = {name for forward in forwards for name in forward.drawn}
    drawn = {name: torch.cat([f.drawn[name] for f in forwards if name in f.drawn]) for name in sorted(names)}
    return MicroBatch(tuple(forward.ids for forward in forwards), loss, drawn)


def _together(first: Step, then: Step) -> Step:
    """Return two optimizers' parts of a step as one."""
    return replace(
        first,
        gradients={**first.gradients, **then.gradients},
        after=then.after,
        learning_rates=first.learning_rates + then.learning_rates,
        skipped=first.skipped or then.skipped,
    )


def _recomputes() -> bool:
    """Say whether this is inside of a backward: an activation is computed once more, nothing is trained anew."""
    return torch._C._current_graph_task_id() != -1


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
