"""Records what happens on a rank while a subject trains. It never judges.

The subject needs no changes: evidence comes from the global optimizer-step hooks, hooks on the job's model,
the job's loss, and the GradScaler.
"""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from plumbline.recording.grad_scaler import follow_scaled_steps, skips_in_its_kernel
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.pause import is_paused, paused
from plumbline.recording.process import rank_and_world
from plumbline.worker.recorder.model_tensors import ModelTensors, copied, is_zero
from plumbline.worker.recorder.passes import Forward, OptimizerPart, Passes, belongs, joined


class StepHooks(ABC):
    """Follows the steps of this process, for recording or for timing, from ``install`` until the process ends.

    ``count`` is called after each step, with the number of completed steps.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self.world_size = 1
        self.steps: list[Step] = []
        self._count = count
        self.optimizer_steps = OptimizerSteps(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return this object: copies of a model, for example for averaged weights, include its hooks."""
        return self

    def install(self) -> None:
        self.optimizer_steps.install()
        follow_scaled_steps(self._scaled_step)

    @abstractmethod
    def watch(self, model: nn.Module) -> None:
        """Follow the forwards of ``model``."""

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose forwards and steps are not part of the training."""
        return nullcontext()

    def holding(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return a context in which the model has values only for the parameters and buffers ``names``."""
        return nullcontext()

    def parts(self, parts: Mapping[str, FlatPart | Part], ranks: Collection[int]) -> None:  # noqa: B027
        """Note which parts of parameters this rank holds."""

    def skipped(self, optimizer: Optimizer, scale: float) -> None:  # noqa: B027
        """Note that the trainer's own loss scaler skips a step of ``optimizer`` at this ``scale``."""

    def on_loss(self, batch: Any) -> None:  # noqa: B027
        """Note the computation of the loss of ``batch``."""

    def on_log(self, name: str, value: Any) -> None:  # noqa: B027
        """Note a metric."""

    def on_finished(self) -> None:  # noqa: B027
        """Note that this process has trained to the end."""

    def trace(self, rank: int, raised: BaseException | None = None) -> RankTrace:
        """Return this process's trace, with the exception that the subject has ``raised``."""
        failed_at = time.time()
        trace = self._trace(rank)
        if raised is None:
            return trace
        return replace(trace, error=in_words(raised), failed_at=failed_at, stack=calls_in(raised))

    @abstractmethod
    def _trace(self, rank: int) -> RankTrace: ...

    def _note_world(self) -> None:
        """Note the world size now: the process group may be gone when the subject returns."""
        if (place := rank_and_world()) is not None:
            self.world_size = place[1]

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: B027
        """Note the beginning of a step."""

    def gradients_ready(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Note the gradients of a step; if it has a closure, the gradients that the closure has computed."""

    @abstractmethod
    def step_ends(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def _scaled_step(self, scaler: Any, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call the ``step`` of an enabled GradScaler, which may skip the optimizer's step; return its result."""


class Recorder(StepHooks):
    """Collects the steps of this process.

    Large weights and gradients are written to ``store`` at once; all others are kept in memory. Without a store all
    are.
    """

    def __init__(self, store: TensorStore | None = None, count: Callable[[int], None] = lambda steps: None) -> None:
        super().__init__(count)
        self._store = store
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


_AROUND = (("worker", "rank.py"), ("multiprocessing", "process.py"), ("multiprocessing", "spawn.py"))
"""The files that call trainers, as folder and name: of Plumbline and of multiprocessing."""

_LONGEST_SOURCE = 100
"""The largest number of characters that are shown of a line of source."""


def in_words(raised: BaseException) -> str:
    """Return the error's type and message, even if converting the error to text raises."""
    try:
        return f"{type(raised).__name__}: {str(raised).strip()}".removesuffix(": ")
    except Exception as error:
        return f"{type(raised).__name__}, whose message raises {type(error).__name__}"


def calls_in(raised: BaseException) -> str:
    """Return the trainer's calls that led to an exception, one per line with its source, the innermost first."""
    calls = list(traceback.extract_tb(raised.__traceback__))
    while calls and tuple(calls[0].filename.split(os.sep)[-2:]) in _AROUND:
        del calls[0]
    return "\n".join(map(_in_a_line, calls[::-1]))


def _in_a_line(call: traceback.FrameSummary) -> str:
    place = f"{'/'.join(call.filename.split('/')[-2:])}:{call.lineno} in {call.name}"
    source = " ".join((call.line or "").split())[:_LONGEST_SOURCE]
    return f"{place}: {source}" if source else place
