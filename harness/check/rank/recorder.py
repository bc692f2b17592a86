"""Records a process's optimizer steps: the gradients that arrived, those that the optimizer received, and facts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.check.evidence import BackwardPass, Facts, Parameter, RecordedStep, segment
from harness.check.options import RecordingOptions
from harness.check.rank.evidence_writer import EvidenceWriter
from harness.check.rank.local_gradients import LocalGradients, Pass
from harness.check.rank.observer import Observer
from harness.check.rank.parameter_names import ParameterNames
from harness.check.rank.pass_windows import PassWindows
from harness.check.rank.pause import is_paused, paused

T = TypeVar("T")

END_TIMEOUT_S = 60.0
"""How long a rank that has recorded its steps waits for the others, beside twice the time that it took itself."""


class TrainingRecorder:
    """Follows the optimizers of this process from step ``after`` on, for as many steps as are asked for.

    Recording ends early at the first error of its own: the script never sees it.
    """

    def __init__(self, options: RecordingOptions, writer: EvidenceWriter, observers: Sequence[Observer] = ()) -> None:
        self._options = options
        self._writer = writer
        self._observers = observers
        self._gradients = LocalGradients(self._pass_begins, self._pass_ends)
        self._windows = PassWindows()
        self._names = ParameterNames()
        self._optimizers: list[Optimizer] = []
        self._steps: dict[int, int] = {}
        self._nested = 0
        self._recording = False
        self._finished = False
        self._error = ""
        self._began = 0.0
        self._pending: RecordedStep | None = None
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self._world = (0, 1)

    def install(self) -> None:
        """Follow every optimizer that the script makes."""
        self._gradients.install()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        optimizer_class: Any = Optimizer
        add = optimizer_class.add_param_group

        def followed(optimizer: Any, group: Any) -> Any:
            result = add(optimizer, group)
            self._guarded(lambda: self._note(optimizer))
            return result

        optimizer_class.add_param_group = followed
        for observer in self._observers:
            self._guarded(observer.install)

    def forget(self) -> None:
        """In a forked process: what was recorded is the parent's."""
        self._stop()
        self._finished = True

    @property
    def progress(self) -> dict[str, object]:
        """What came of recording, for a process that leaves no steps: counts, and the recorder's own error."""
        return {
            "optimizers": len(self._optimizers),
            "passes": self._gradients.count,
            "steps": sum(number + 1 for number in self._steps.values()),
            "error": self._error,
        }

    def finish(self) -> None:
        """Write what concerns the whole process: after its last recorded step, so that it stays if the process dies."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        self._stop()
        if self._writer.has_steps:
            try:
                self._writer.write_end(self._world[0], self._facts(Observer.final_facts), self._error)
            except OSError as error:
                print(f"plumbline check: the evidence cannot be written: {error}", file=sys.stderr)

    def _note(self, optimizer: Optimizer) -> None:
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            if not self._options.after:
                self._start()

    def _start(self) -> None:
        if not self._recording and not self._finished:
            self._recording = True
            self._began = time.monotonic()
            for observer in self._observers:
                observer.start()

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            self._gradients.stop()
            for observer in self._observers:
                self._guarded(observer.stop)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pass_begins(self, one: Pass) -> None:
        if self._recording:
            self._guarded(lambda: self._begin_pass(one))

    def _begin_pass(self, one: Pass) -> None:
        for optimizer in self._optimizers:
            self._gradients.follow(_parameters(optimizer))
        for observer in self._observers:
            observer.backward_begins(one.number)

    def _pass_ends(self, one: Pass) -> None:
        if self._recording:
            self._guarded(lambda: self._end_pass(one))

    def _end_pass(self, one: Pass) -> None:
        for observer in self._observers:
            facts = observer.backward_ends(one.number)
            if facts is not None:
                one.facts[observer.name] = facts
        if one.local:
            self._windows.add(one)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_paused():
            return None
        self._nested += 1
        if self._nested > 1:  # of an optimizer inside of an optimizer the outer one's step is the script's
            return None
        self._guarded(lambda: self._count(optimizer))
        if not self._recording:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._guarded(lambda: self._prepare(optimizer))
            return None

        def followed() -> Any:
            loss = closure()
            self._guarded(lambda: self._prepare(optimizer))
            return loss

        # Lightning computes the gradients in there.
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _count(self, optimizer: Optimizer) -> None:
        """Begin or end recording, as far as the number of this step asks for it."""
        self._note(optimizer)
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), -1) + 1
        if self._recording and number >= self._options.after + self._options.steps:
            self._stop()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_paused():
            return
        self._nested -= 1
        if self._nested == 0:
            self._guarded(lambda: self._complete(optimizer, skipped=False))

    def on_skipped(self, optimizer: Optimizer) -> None:
        """Note that the GradScaler skipped an optimizer's step."""
        self._guarded(lambda: self._skip(optimizer))

    def _skip(self, optimizer: Optimizer) -> None:
        self._count(optimizer)
        if self._recording:
            self._prepare(optimizer)
            self._complete(optimizer, skipped=True)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Take down everything that the step itself changes."""
        self._world = _world()
        parameters = list(_parameters(optimizer))
        names = self._names.of(optimizer, parameters)
        own, others = self._windows.take(self._optimizers.index(optimizer))
        with torch.no_grad(), paused():
            received = torch.cat([_received(optimizer, parameter) for parameter in parameters])
            for observer in self._observers:
                observer.before_step(optimizer)
        self._pending = RecordedStep(
            self._optimizers.index(optimizer),
            self._steps[id(optimizer)],
            tuple(
                Parameter(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
                for name, parameter in zip(names, parameters, strict=True)
            ),
            received,
            tuple(_vector(one, parameters) for one in own),
            tuple(_vector(one, parameters) for one in others),
        )

    def _complete(self, optimizer: Optimizer, *, skipped: bool) -> None:
        pending, self._pending = self._pending, None
        if self._recording and pending is not None:
            with torch.no_grad(), paused():
                facts = self._facts(lambda observer: observer.after_step(optimizer, skipped=skipped))
            self._writer.write_step(
                *self._world,
                RecordedStep(**{**vars(pending), "skipped": skipped, "facts": {**pending.facts, **facts}}),
            )
        self._windows.drop()
        done = self._steps.get(id(optimizer), -1) + 1
        if not self._recording and not self._finished and done == self._options.after:
            self._start()
        elif self._recording and all(
            self._steps.get(id(one), -1) + 1 >= self._options.after + self._options.steps
            for one in self._optimizers
            if id(one) in self._steps
        ):
            self.finish()
            if self._options.stop:
                self._end_process()

    def _end_process(self) -> None:
        """End the process with all others of its group: those that are behind may still need it."""
        self._writer.wait_for_ends(self._world[1], END_TIMEOUT_S + 2 * (time.monotonic() - self._began))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _facts(self, note: Callable[[Observer], Facts | None]) -> Facts:
        noted = {observer.name: note(observer) for observer in self._observers}
        return {name: facts for name, facts in noted.items() if facts is not None}

    def _guarded(self, do: Callable[[], T]) -> T | None:
        """Do something of the recorder's; an error in it ends recording, and the script goes on."""
        try:
            return do()
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"
            if os.environ.get("PLUMBLINE_CHECK_DEBUG"):
                import traceback

                traceback.print_exc()
            if self._recording:
                self._stop()
            return None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _received(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return the segment of the gradient with which an optimizer steps, NaN where there is none."""
    if parameter.grad is None:
        return torch.full_like(segment(torch.empty_like(parameter)), torch.nan)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer's kernel unscales
    return segment(gradient) if scale is None else segment(gradient) / float(scale)


def _vector(one: Pass, parameters: Sequence[Tensor]) -> BackwardPass:
    def joined(parts: dict[int, Tensor]) -> Tensor:
        return torch.cat(
            [
                parts[id(p)] if id(p) in parts else torch.zeros(segment(p).numel(), dtype=torch.float64)
                for p in parameters
            ]
        )

    exact = None if one.exact is None else joined(one.exact)
    return BackwardPass(one.number, joined(one.local), exact, one.scale, one.facts)


def _world() -> tuple[int, int]:
    """Return the rank of this process and the world's size; without a group, what the launcher says of the rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), 1
