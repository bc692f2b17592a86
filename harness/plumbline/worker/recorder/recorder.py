"""Records what happens on a rank while a subject trains. It never judges.

The subject needs no changes: evidence comes from the global optimizer-step hooks, hooks on the job's model,
the job's loss, and the GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.tensor_store import TensorStore
from plumbline.evidence.trace import Evaluation, Logged, MicroBatch, RankTrace, Step, Tensors
from plumbline.recording.backward_passes import in_backward
from plumbline.recording.grad_scaler import skips_in_its_kernel
from plumbline.recording.pause import is_paused, paused
from plumbline.recording.process import rank_and_world
from plumbline.worker.recorder.model_tensors import ModelTensors, copied, is_zero
from plumbline.worker.recorder.passes import Forward, OptimizerPart, Passes, belongs, joined
from plumbline.worker.step_hooks import StepCounter, StepHooks


class Recorder(StepHooks):
    """Collects the steps of this process.

    Large weights and gradients are written to ``store`` at once; all others are kept in memory. Without a store all
    are.
    """

    def __init__(self, store: TensorStore | None = None, done: StepCounter | None = None) -> None:
        super().__init__(bytearray(8) if done is None else done)
        self._store = store
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.logged: list[Logged] = []
        self._tensors = ModelTensors(store)
        self._watched: list[nn.Module] = []
        self._devices: set[str] = set()
        self._passes = Passes()
        self._evaluating = Lock()
        self._before: Tensors = {}
        self._off_masters: dict[str, float] | None = None
        self._gradients: Tensors = {}
        self._scale: float | None = None
        self._buffers: Tensors = {}
        self._parts: list[OptimizerPart] = []

    def watch(self, model: nn.Module) -> None:
        """Follow ``model``: its parameters by name, the samples in its forwards, and the random draws of its layers."""
        self._tensors.watch(model)
        self._watched.append(model)
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        model.register_forward_hook(self._on_outputs)
        for layer in model.modules():
            if getattr(layer, "draws", None):
                layer.register_forward_hook(self._on_draw)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which no forward, loss, draw or step is recorded."""
        return paused()

    def holding(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return a context in which only the parameters and buffers ``names`` are recorded."""
        return self._tensors.holding(names)

    def parts(self, parts: Mapping[str, FlatPart | Part], ranks: Collection[int]) -> None:
        self._tensors.parts(parts, ranks)

    @property
    def has_steps(self) -> bool:
        return bool(self.steps)

    def on_loss(self, batch: Any) -> None:
        """Record that the job's loss was computed for ``batch``, which ends a micro-batch."""
        if torch.is_grad_enabled() and not is_paused():
            self._passes.close(_ids(batch))

    def on_log(self, name: str, value: Any) -> None:
        self.logged.append(Logged(len(self.steps), name, float(value), len(self._passes)))

    def _trace(self, rank: int) -> RankTrace:
        self._note_world()
        self._settle()
        model = self._tensors.model
        buffers = {} if model is None else self._tensors.buffers(model)
        final = None if model is None else self._current_weights()
        if self._store is not None and self._store.failure is not None:
            raise self._store.failure
        return RankTrace(
            rank=rank,
            world_size=self.world_size,
            steps=tuple(self.steps),
            error=None,
            failed_at=None,
            final=final,
            final_buffers=buffers,
            evaluations=tuple(self.evaluations),
            logged=tuple(self.logged),
            torch=torch.__version__,
            holds_nothing=self._tensors.holds_nothing,
            devices=tuple(sorted(self._devices)),
        )

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward() or is_paused():
            return
        batch = next((value for value in (*args, *kwargs.values()) if _ids(value) is not None), None)
        if batch is None:
            return
        ids = _ids(batch) or ()
        if not torch.is_grad_enabled():
            self._evaluated(len(self._passes), ids, module.training)
            return
        if any(module is one for one in self._watched):
            self._tensors.model = module  # if there are several models, this one is trained
        if not self._passes:
            self._note_world()  # also here: a window without a step is recorded nowhere else
            self._buffers = self._tensors.buffers(module)
        self._passes.add(Forward(batch["index"].device.index or 0, ids, module.training))

    def _on_outputs(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Detect a backward pass through a forward in evaluation mode: only then does the forward count as training.

        Master weights are compared here, because a trainer may copy them to the model as late as this forward, and
        overwrite them before the step.
        """
        if in_backward() or not torch.is_grad_enabled():
            return
        if self._off_masters is None and self._tensors.has_masters and not is_paused():
            self._off_masters = self._tensors.off_masters()
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        if not is_paused():
            self._devices.update(one.device.type for one in tensors if not one.is_meta)
        if module.training:
            return
        for output in tensors:
            if output.requires_grad:
                forward = self._passes.last_on(output.device.index or 0)
                if forward is not None:
                    register: Any = output.register_hook
                    register(partial(_differentiate, forward))

    def _evaluated(self, micro_batches: int, ids: tuple[int, ...], training: bool) -> None:
        place = (len(self.steps), micro_batches)
        with self._evaluating:  # replicas on devices run in threads
            last = self.evaluations[-1] if self.evaluations else None
            if last is not None and (last.step, last.micro_batches) == place:
                self.evaluations[-1] = replace(last, samples=last.samples + ids, training=last.training or training)
            else:
                self.evaluations.append(Evaluation(*place, ids, training))

    def _on_draw(self, layer: nn.Module, args: Any, drawn: Tensor) -> None:
        if is_paused() or any(isinstance(one, Tensor) and one.is_meta for one in (*args, drawn)):
            return  # shape inference of a pipeline stage, without values
        device, name = drawn.device.index or 0, str(layer.draws)
        if in_backward():
            self._passes.redraw(device, name, copied(drawn))
        elif layer.training or torch.is_grad_enabled():  # a checkpoint's forward runs without gradients
            forward = self._passes.last_on(device)
            if forward is not None:
                forward.drawn[name] = copied(drawn)

    def _settle(self) -> tuple[MicroBatch, ...]:
        """Return the micro-batches since the last step; record forwards that only evaluated as evaluations."""
        micro_batches, idle = self._passes.settle()
        for place, forward in idle:
            self._evaluated(place, forward.ids, forward.training)
        return tuple(micro_batches)

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if not self.steps:
            self._tensors.refuse_undeclared_parts()
        self._tensors.find_masters(optimizer)
        self._before = self._current_weights()
        if self._off_masters is None:  # no forward has run since the masters were found
            self._off_masters = self._tensors.off_masters()
        self._gradients = self._tensors.received(optimizer) if has_closure else {}  # the closure may not be called

    def gradients_ready(self, optimizer: Optimizer) -> None:
        self._gradients = self._tensors.received(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        skipped = skips_in_its_kernel(optimizer)
        self._append(optimizer, self._before, self._gradients, self._tensors.weights(), skipped=skipped)

    def _append(
        self, optimizer: Optimizer, before: Tensors, gradients: Tensors, after: Tensors, *, skipped: bool
    ) -> None:
        # At every step: the process group may be gone when the subject returns.
        self._note_world()
        micro_batches = self._settle()
        rates = self._tensors.learning_rates(optimizer)
        if not micro_batches and rates and not any(rates) and all(map(is_zero, gradients.values())):
            return  # not training: torch.distributed.checkpoint steps an optimizer to create its state before loading
        step = Step(
            micro_batches=micro_batches,
            before=before,
            gradients=gradients,
            after=after,
            learning_rates=rates,
            skipped=skipped,
            scale=self._scale,
            buffers=self._buffers,
            off_masters=self._off_masters or {},
        )
        self._off_masters = None
        part = OptimizerPart(id(optimizer), self._tensors.names_of(optimizer), step)
        if belongs(part, self._parts):
            self._parts.append(part)
            self.steps[-1] = joined(self._parts)
        else:
            self._parts = [part]
            self.steps.append(step)
            self._count(len(self.steps))

    def _current_weights(self) -> Tensors:
        return self._tensors.weights_since(self.steps[-1].after if self.steps else None)

    def _scaled_step(self, scaler: Any, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        self._scale = scaler.get_scale()
        begun = self.optimizer_steps.begun
        result = step()
        if self.optimizer_steps.begun == begun:
            self._append_skipped(optimizer, self._tensors.received(optimizer))
        return result

    def skipped(self, optimizer: Optimizer, scale: float) -> None:
        """Record a skipped step whose gradients are not available."""
        self._scale = scale
        self._append_skipped(optimizer, {})
        self._scale = None  # the scale of the next step is unknown

    def _append_skipped(self, optimizer: Optimizer, gradients: Tensors) -> None:
        weights = self._current_weights()
        before = self.steps[-1].after if self.steps else weights
        self._append(optimizer, before, gradients, weights, skipped=True)


def _differentiate(forward: Forward, gradient: Tensor) -> None:
    forward.differentiated = True


def _ids(batch: Any) -> tuple[int, ...] | None:
    if isinstance(batch, Mapping) and isinstance(batch.get("index"), Tensor):
        return tuple(batch["index"].reshape(-1).tolist())
    return None


class ChildRecorder(Recorder):
    """A recorder that learns its rank from the process group, and that can be pickled and sent to a child.

    A pickled model includes its hooks. Once unpickled, they belong to the recorder of the new process
    (:mod:`plumbline.worker.node_member` explains how the recorder is pickled).
    """

    def __init__(self, store: TensorStore, report: Callable[..., None], finish: Callable[[], None]) -> None:
        super().__init__(store, _Counter(report))
        self.rank: int | None = None
        self._report = report
        self._finish = finish

    @property
    def model(self) -> nn.Module | None:
        """The model that is recorded, and that carries the recorder's hooks."""
        return self._tensors.model

    def __setstate__(self, model: nn.Module) -> None:
        # The model has no parameters yet: it is still being unpickled, and its hook refers to this recorder.
        self._tensors.model = model
        self._watched = [model]

    @property
    def is_active(self) -> bool:
        """Whether anything was recorded that only ranks do."""
        return bool(self.steps or self.evaluations or self.rank is not None)

    def reset(self) -> None:
        """Forget all but the models: what was recorded so far belongs to the parent process."""
        model, watched = self._tensors.model, self._watched
        self.__init__(self._store, self._report, self._finish)  # type: ignore[misc]
        self._tensors.model, self._watched = model, watched

    def on_finished(self) -> None:
        """Write the evidence now: this process may be killed."""
        self._finish()

    def _note_world(self) -> None:
        super()._note_world()
        place = rank_and_world()
        if place is not None and place[0] != self.rank:
            self.rank = place[0]
            self._report(rank=self.rank)


class _Counter:
    """A recorder's number of steps: each new number is reported."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report

    def __setitem__(self, place: slice, number: bytes) -> None:
        self._report(steps=int.from_bytes(number, "little"))


def compute_as_named() -> None:
    """Turn off TF32 and 16-bit reductions in this process, without starting CUDA.

    Both are less accurate than the rounding noise that the judge measures, so a correct trainer would fail. A subject
    may turn them on again; its gradients are then judged with their TF32 errors.
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
    """
    # Every torch has these switches. cuDNN's is for convolutions and recurrent layers.
    torch.backends.cudnn.allow_tf32 = False
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
