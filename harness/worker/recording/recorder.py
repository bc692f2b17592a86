"""Takes down what happens on a rank while somebody else's code trains. It never judges.

Nothing is asked of the subject: evidence comes from the global optimizer-step hooks, hooks on the job's model,
the job's loss, and the GradScaler.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from harness.core.errors import TraceError
from harness.evidence.trace import SKETCH_ABOVE, Evaluation, Logged, MicroBatch, RankTrace, Step, Tensors
from harness.worker.recording.optimizer_parts import Part, belongs, joined
from harness.worker.recording.passes import Forward, Passes
from harness.worker.recording.tensor_copies import copied, is_flattened, is_still, is_zero, kept


class Recorder:
    """Collects the steps of this process. ``install`` hooks it into torch for the rest of the process's life.

    Weights and gradients of more than ``sketch_above`` entries are taken down as sketches, and DTensors as shards.
    """

    def __init__(self, sketch_above: int = SKETCH_ABOVE, done: MutableSequence[int] | None = None) -> None:
        self._sketch_above = sketch_above
        self._done = bytearray(8) if done is None else done
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.logged: list[Logged] = []
        self.world_size = 1
        self._model: nn.Module | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._named: dict[int, tuple[str, Tensor]] = {}  # by id, which is the tensor's as long as this holds it
        self._passes = Passes()
        self._evaluating = Lock()
        self._before: Tensors = {}
        self._gradients: Tensors = {}
        self._scale: float | None = None
        self._buffers: Tensors = {}
        self._nested = 0
        self._parts: list[Part] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """Return this recorder: a copy of the model (an average of weights, say) brings its hooks along."""
        return self

    def install(self) -> None:
        """Hook into torch's optimizers and GradScaler."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_scaler(torch.amp.GradScaler)

    def watch(self, model: nn.Module) -> None:
        """Follow ``model``: its parameters by name, the samples that go through its forward, and what it draws."""
        self._model = model
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        model.register_forward_hook(self._on_outputs)
        for layer in model.modules():
            if getattr(layer, "draws", None):
                layer.register_forward_hook(self._on_draw)

    @property
    def has_steps(self) -> bool:
        """Whether an optimizer step was recorded."""
        return bool(self.steps)

    def on_loss(self, batch: Any) -> None:
        """Take down that the job's loss saw ``batch``: it closes a micro-batch."""
        if torch.is_grad_enabled():
            self._passes.close(_ids(batch))

    def on_log(self, name: str, value: Any) -> None:
        """Take down a metric that the subject reports."""
        self.logged.append(Logged(len(self.steps), name, float(value), len(self._passes)))

    def trace(self, rank: int, error: str | None, failed_at: float | None) -> RankTrace:
        """Return all that was taken down, now that training is over."""
        self._note_world()
        self._settle()
        buffers = {} if self._model is None else {name: copied(value) for name, value in self._model.named_buffers()}
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
            torch=torch.__version__,
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
            self._evaluated(len(self._passes), ids, module.training)
            return
        if not self._passes:
            self._buffers = {name: copied(buffer) for name, buffer in module.named_buffers()}
        self._passes.add(Forward(batch["index"].device.index or 0, ids, module.training))

    def _on_outputs(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Notice whether a backward goes through a forward in evaluation mode: only then is it training."""
        if module.training or _recomputes() or not torch.is_grad_enabled():
            return
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                forward = self._passes.last_on(output.device.index or 0)
                if forward is not None:
                    output.register_hook(partial(_differentiate, forward))

    def _evaluated(self, micro_batches: int, ids: tuple[int, ...], training: bool) -> None:
        place = (len(self.steps), micro_batches)
        with self._evaluating:  # replicas on CUDA run in threads
            last = self.evaluations[-1] if self.evaluations else None
            if last is not None and (last.step, last.micro_batches) == place:
                self.evaluations[-1] = replace(last, samples=last.samples + ids, training=last.training or training)
            else:
                self.evaluations.append(Evaluation(*place, ids, training))

    def _on_draw(self, layer: nn.Module, args: Any, drawn: Tensor) -> None:
        device, name = drawn.device.index or 0, str(layer.draws)
        if _recomputes():
            self._passes.redraw(device, name, copied(drawn))
        elif layer.training or torch.is_grad_enabled():  # what is to be computed once more runs without gradients first
            forward = self._passes.last_on(device)
            if forward is not None:
                forward.drawn[name] = copied(drawn)

    def _settle(self) -> tuple[MicroBatch, ...]:
        """Return the micro-batches since the last step; what only evaluated among them is an evaluation."""
        micro_batches, idle = self._passes.settle()
        for place, forward in idle:
            self._evaluated(place, forward.ids, forward.training)
        return tuple(micro_batches)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._nested += 1
        if self._nested > 1:
            return None  # an optimizer inside of an optimizer: the outer one's step is what the subject asked for
        if not self.steps:
            self._refuse_flattened()
        self._before = self._standing()
        self._gradients = self._handed(optimizer)
        return self._with_closure(optimizer, args, kwargs)

    def _with_closure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of a step whose closure computes the gradients that it takes; None where it has none.

        Lightning does all of a batch in there.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def recorded() -> Any:
            loss = closure()
            self._gradients = self._handed(optimizer)
            return loss

        return ((args[0], recorded, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": recorded})

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nested -= 1
        if self._nested == 0:
            skipped = _skips_in_its_kernel(optimizer)
            self._append(optimizer, self._before, self._gradients, self._weights(), skipped=skipped)

    def _append(
        self, optimizer: Optimizer, before: Tensors, gradients: Tensors, after: Tensors, *, skipped: bool
    ) -> None:
        # Asked at every step: the group may be gone by the time the subject returns.
        self._note_world()
        micro_batches = self._settle()
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        if not micro_batches and rates and not any(rates) and all(map(is_zero, gradients.values())):
            return  # no training: torch.distributed.checkpoint lets an optimizer make the state that it will load into
        step = Step(
            micro_batches=micro_batches,
            before=before,
            gradients=gradients,
            after=after,
            learning_rates=rates,
            skipped=skipped,
            scale=self._scale,
            buffers=self._buffers,
        )
        part = Part(id(optimizer), tuple(filter(None, self._names_of(optimizer))), step)
        if belongs(part, self._parts):
            self._parts.append(part)
            self.steps[-1] = joined(self._parts)
        else:
            self._parts = [part]
            self.steps.append(step)
            self._done[:8] = len(self.steps).to_bytes(8, "little")

    def _final(self) -> Tensors | None:
        """Return the model's weights as they are now: the last step's own object where they are the same."""
        return None if self._model is None else self._standing()

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
                weights = recorder._standing()
                before = last.after if last else weights
                gradients = recorder._handed(optimizer)
                recorder._append(optimizer, before, gradients, weights, skipped=True)
            return result

        scaler_class.step = recorded

    def _weights(self) -> Tensors:
        if self._model is None:
            return {}
        return {name: kept(parameter, self._sketch_above) for name, parameter in self._model.named_parameters()}

    def _refuse_flattened(self) -> None:
        """Raise where the model's parameters are pieces of long vectors, which nobody could put together."""
        for name, parameter in self._model.named_parameters() if self._model is not None else ():
            if is_flattened(parameter) or parameter.shape != self._shapes.get(name, parameter.shape):
                raise TraceError(
                    f"{name} is flattened, as FullyShardedDataParallel does it: of what ranks share out only DTensors "
                    "can be taken down, which fully_shard (FSDP2) makes"
                )

    def _standing(self) -> Tensors:
        """Return the weights as they are now: the last step's own object where they have not changed since."""
        last = self.steps[-1].after if self.steps else None
        own = {} if self._model is None else dict(self._model.named_parameters())
        if last is not None and last.keys() == own.keys() and all(is_still(own[name], last[name]) for name in last):
            return last
        return self._weights()

    def _names_of(self, optimizer: Optimizer) -> list[str | None]:
        """Return the names of an optimizer's parameters, in its own order; None for one that is not the model's."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(parameter) not in self._named for parameter in parameters) and self._model is not None:
            # As the model is now: fully_shard has put others in the place of the parameters that there were at first.
            self._named = {id(parameter): (name, parameter) for name, parameter in self._model.named_parameters()}
        names = [self._named[id(p)][0] if id(p) in self._named else None for p in parameters]
        own = list(self._named.values())
        if not any(names) and [p.shape for p in parameters] == [p.shape for _, p in own]:
            return [name for name, _ in own]  # master weights: other tensors, handed over in the model's own order
        return names

    def _handed(self, optimizer: Optimizer) -> Tensors:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer's kernel unscales
        return {
            name: kept(parameter.grad if scale is None else parameter.grad.detach() / float(scale), self._sketch_above)
            for name, parameter in zip(self._names_of(optimizer), parameters, strict=True)
            if name is not None and parameter.grad is not None
        }


def _skips_in_its_kernel(optimizer: Optimizer) -> bool:
    """Say whether the GradScaler has told a fused optimizer that a gradient is not finite: its kernel changes nothing.

    See ``_step_supports_amp_scaling`` in torch.amp.GradScaler.step.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def _differentiate(forward: Forward, gradient: Tensor) -> None:
    forward.differentiated = True


def _recomputes() -> bool:
    """Say whether this is inside of a backward: an activation is computed once more, nothing is trained anew."""
    return torch._C._current_graph_task_id() != -1


def _ids(batch: Any) -> tuple[int, ...] | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("index"), Tensor):
        return tuple(batch["index"].reshape(-1).tolist())
    return None
