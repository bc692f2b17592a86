"""Records a process's optimizer steps: the gradients that arrived, those that the optimizer received, and facts."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.evidence.training import Facts, Parameter, RecordedStep, as_real
from plumbline.check.rank.evidence_writer import EvidenceWriter
from plumbline.check.rank.local_gradients import ArrivedGradients, LocalGradients
from plumbline.check.rank.memory_needed import NotEnoughMemoryError, require_memory
from plumbline.check.rank.observers.recomputation import recomputed_otherwise
from plumbline.check.rank.observers.tensor_digest import tensor_digest
from plumbline.check.rank.optimizer.clipping import ClippingObserver
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer_gradients import (
    exact_segment,
    has_gradient_hooks,
    has_own_hooks,
    kept,
    received,
    unclipped_vector,
    vector,
)
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.check.rank.pass_windows import PassWindows
from plumbline.evidence.dtypes import dtype_name
from plumbline.recording.grad_scaler import skips_in_its_kernel
from plumbline.recording.observer import Observer
from plumbline.recording.observers import Observers
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import follow_added_parameters, parameters_of
from plumbline.recording.pause import paused
from plumbline.recording.process import rank_and_world
from plumbline.recording.sharding import arrival_leaves, reduction_dtypes
from plumbline.replay.exact_gradients import ExactGradients, ExactPass
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.tracked_calls import TrackedCalls
from plumbline.replay.unwrapping import unwrapped

MOST_LATE = 8
"""Optimizers after the recorded steps that are named: some scripts make one for every task."""

T = TypeVar("T")

END_TIMEOUT_S = 60.0
"""How long a rank that has recorded its steps waits for the others, beside twice the time that it took itself."""

HOOKED = "the script has hooks on it, and activation checkpoints recomputed other values than the forward"


class TrainingRecorder:
    """Follows the optimizers of this process from step ``after`` on, for as many steps as are asked for.

    Recording ends early at the first error of its own: the script never sees it.
    """

    def __init__(
        self,
        options: RecordingOptions,
        writer: EvidenceWriter,
        loss_scale: LossScale,
        clipping: ClippingObserver,
        others: Sequence[Observer] = (),
        sample: ParameterSample | None = None,
    ) -> None:
        self._options = options
        self._sample = sample or ParameterSample(0)
        self._has_memory = False
        self._writer = writer
        self._observers = Observers((loss_scale, clipping, *others))
        self._loss_scale = loss_scale
        loss_scale.on_skipped = self._on_skipped
        clipping.on_clipping = self._on_clipping
        self._gradients = LocalGradients(self._pass_begins, self._pass_ends)
        self._calls = TrackedCalls(self._current_pass, self._forward_begins, self._runs_again, self._forward_ends)
        self._exact = ExactGradients(self._calls, exact_segment, ReplayPrecision(options.truth), self._sample.has)
        self._uncovered: dict[str, str] = {}
        self._unclipped: dict[int, Tensor] = {}
        self._windows = PassWindows()
        self._names = ParameterNames()
        self._optimizers: list[Optimizer] = []
        self._steps: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._optimizer_steps = OptimizerSteps(self)
        self._recording = False
        self._finished = False
        self._later: set[str] = set()
        self._late: dict[str, dict[str, int]] = {}
        self._seen_late: WeakSet[Optimizer] = WeakSet()
        self._error = ""
        self._began = 0.0
        self._pending: RecordedStep | None = None
        self._ended = False
        self._pid = os.getpid()
        self._world = (0, 1)

    def install(self) -> None:
        """Follow every optimizer that the script makes."""
        self._gradients.passes.install()
        self._optimizer_steps.install(outside_graphs=True)
        follow_added_parameters(lambda optimizer: self._guarded(lambda: self._note(optimizer)))
        self._guarded(lambda: self._observers.tell(lambda one: one.install()))

    def forget(self) -> None:
        """In a forked process: record its steps as its own, unless the parent has taken some itself."""
        if self._steps:
            self._stop()
            self._finished = True
        else:
            self._pid = os.getpid()

    @property
    def has_steps(self) -> bool:
        """Whether this process has written a step."""
        return self._writer.has_steps

    @property
    def progress(self) -> dict[str, object]:
        """What came of recording, for a process that leaves no steps: counts, and the recorder's own error."""
        return {
            "optimizers": len(self._optimizers),
            "passes": self._gradients.passes.count,
            "begun": len(self._steps),
            "steps": sum(self._steps.values()),
            "error": self._error,
        }

    def finish(self) -> None:
        """Write what concerns the whole process: after its last recorded step, so that it stays if the process dies."""
        if os.getpid() != self._pid:
            return
        if self._finished:
            if self._later:
                self._write_later()
            return
        self._finished = True
        self._stop()
        if self._writer.has_steps:
            try:
                facts = {
                    **self._observers.final_facts(),
                    "uncovered": self._uncovered,
                    "unstepped": self._unstepped(),
                }
                self._writer.write_end(self._world[0], facts, self._error)
            except OSError as error:
                print(f"plumbline check: the evidence cannot be written: {error}", file=sys.stderr)
                return
            self._observers.tell(lambda one: one.after_recording(partial(self._write_later, one.name)))

    def _write_later(self, *changed: str) -> None:
        """Write the facts of observers that watch after the recorded steps: of those that ``changed``, and others."""
        if os.getpid() == self._pid:
            self._later.update(changed)
            facts = {**self._observers.final_facts(self._later), "late": self._late}
            with suppress(OSError):  # the check may have ended before the process, and removed its folder
                self._writer.write_later(self._world[0], facts)

    def _unoptimized(self) -> Facts:
        """Return the parameters of called modules that require a gradient and are in no optimizer, by their names.

        Each with its shape, whether it has a gradient, and where there are several ranks a digest of its values.
        """
        known = {id(one) for optimizer in self._optimizers for one in parameters_of(optimizer)}
        found = (one for root in self._names.roots for one in root.parameters())
        return {
            self._names.of_one(one): {
                "shape": list(one.shape),
                "gradient": one.grad is not None,
                "digest": tensor_digest(one) if self._world[1] > 1 else None,
            }
            for one in found
            if one.requires_grad and id(one) not in known
        }

    def _unstepped(self) -> dict[str, dict[str, int]]:
        """Return the entries of trainable parameters by their names, by the number of an optimizer not recorded."""
        recorded = [one for one in self._optimizers if id(one) in self._recorded]
        seen = {id(parameter) for optimizer in recorded for parameter in parameters_of(optimizer)}
        found: dict[str, dict[str, int]] = {}
        for place, optimizer in enumerate(self._optimizers):
            parameters = parameters_of(optimizer)
            named = zip(self._names.of(optimizer), parameters, strict=True)
            own = {name: p.numel() for name, p in named if p.requires_grad and id(p) not in seen}
            seen.update(map(id, parameters))
            if own:
                found[str(place)] = own
        return found

    def _note_late(self, optimizer: Optimizer) -> None:
        """Note the parameters of an optimizer that begins to step after the recorded steps: some of the first ones."""
        if not self._finished or optimizer in self._seen_late or any(one is optimizer for one in self._optimizers):
            return
        self._seen_late.add(optimizer)
        if len(self._late) < MOST_LATE:
            parameters = parameters_of(optimizer)
            named = zip(self._names.of(optimizer), parameters, strict=True)
            self._late[str(len(self._late))] = {name: one.numel() for name, one in named if one.requires_grad}
            self._write_later()

    def _note(self, optimizer: Optimizer) -> None:
        if self._finished:
            return
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._observers.tell(lambda one: one.optimizer_made(optimizer))
            if not self._options.after:
                self._start()

    def _start(self) -> None:
        if not self._recording and not self._ended:
            self._recording = True
            self._began = time.monotonic()
            self._calls.start()
            self._observers.tell(lambda one: one.start())

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            self._gradients.stop()
            self._calls.stop()
            self._guarded(self._observers.stop)
        self._ended = True

    def _current_pass(self) -> int | None:
        return None if self._gradients.current is None else self._gradients.current.number

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names.add(unwrapped(module))
        self._observers.tell(lambda one: one.forward_begins(module, args, kwargs))

    def _forward_ends(self) -> None:
        self._observers.tell(lambda one: one.forward_ends())

    def _runs_again(self, module: nn.Module) -> None:
        self._observers.tell(lambda one: one.runs_again(module))

    def _pass_begins(self, one: ArrivedGradients, roots: Sequence[Tensor]) -> None:
        if self._recording:
            self._guarded(lambda: self._begin_pass(one, roots))

    def _begin_pass(self, one: ArrivedGradients, roots: Sequence[Tensor]) -> None:
        self._unclipped.clear()
        for optimizer in self._optimizers:
            self._sample.add(parameters_of(optimizer))
        self._calls.pass_begins(one.number, roots)
        leaves = {id(one): (one, one) for optimizer in self._optimizers for one in parameters_of(optimizer)}
        leaves |= {id(one): (one, leaf) for one, leaf in arrival_leaves(self._names.roots)}
        self._gradients.follow(leaves.values(), self._sample.has)
        one.facts["versions"] = [sum(p._version for p in parameters_of(optimizer)) for optimizer in self._optimizers]
        self._observers.tell(lambda observer: observer.backward_begins(one.number, roots))

    def _pass_ends(self, one: ArrivedGradients) -> None:
        if self._recording:
            self._guarded(lambda: self._end_pass(one))

    def _end_pass(self, one: ArrivedGradients) -> None:
        if self._gradients.error is not None:
            raise self._gradients.error
        one.facts |= self._observers.tell(lambda observer: observer.backward_ends(one.number))
        one.scale = self._loss_scale.scale
        if one.local or one.distributed:
            one.facts["distributed"] = one.distributed
            self._windows.add(one)

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._guarded(lambda: self._note_late(optimizer) if self._ended else self._count(optimizer))

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if self._recording:
            self._guarded(lambda: self._prepare(optimizer))

    def step_ends(self, optimizer: Optimizer) -> None:
        if not self._ended:
            skipped = self._guarded(lambda: skips_in_its_kernel(optimizer))
            self._guarded(lambda: self._complete(optimizer, skipped=bool(skipped)))

    def _count(self, optimizer: Optimizer) -> None:
        """End recording, as far as the number of this step asks for it."""
        self._note(optimizer)
        if id(optimizer) not in self._steps:
            with torch.no_grad(), paused():
                self._observers.tell(lambda one: one.first_step(optimizer))
        number = self._steps.setdefault(id(optimizer), 0)
        if self._recording and number >= self._options.after + self._options.steps:
            self._stop()

    def _on_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Take down gradients before they are clipped."""
        if not self._recording:
            return
        scales = {
            id(one): self._loss_scale.pending_scale(opt) for opt in self._optimizers for one in parameters_of(opt)
        }
        with torch.no_grad(), paused():
            for one in parameters:
                if one.grad is not None and id(one) not in self._unclipped and self._sample.has(one):
                    self._unclipped[id(one)] = kept(one.grad) / scales.get(id(one), 1.0)

    def _on_skipped(self, optimizer: Optimizer) -> None:
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
        parameters = parameters_of(optimizer)
        self._sample.add(parameters)
        if not self._has_memory and not self._options.dry_run:
            require_memory(self._names.roots, parameters, self._sample, self._options)
            self._has_memory = True
        names = self._names.of(optimizer)
        running = self._gradients.current
        own, others = self._windows.take(self._optimizers.index(optimizer), running)
        reduced = reduction_dtypes(self._names.roots)
        with torch.no_grad(), paused():
            gradients, norms = zip(
                *(received(optimizer, one, sampled=self._sample.has(one)) for one in parameters), strict=True
            )
            if running is None:
                self._replay([*own, *others])
            self._observers.tell(lambda one: one.before_step(optimizer))
        self._pending = RecordedStep(
            self._optimizers.index(optimizer),
            self._steps[id(optimizer)],
            tuple(
                Parameter(
                    name,
                    tuple(values.shape),
                    dtype_name(values.dtype),
                    dtype_name(reduced.get(id(parameter))),
                    self._sample.has(parameter),
                    self._names.knows(parameter),
                    parameter.requires_grad,
                )
                for name, parameter, values in zip(names, parameters, map(as_real, parameters), strict=True)
            ),
            torch.cat(gradients),
            tuple(vector(one, parameters, self._sample) for one in own),
            tuple(vector(one, parameters, self._sample) for one in others),
            facts={"gradient_hooks": sum(map(has_own_hooks, parameters)), "unoptimized": self._unoptimized()},
            norm=math.hypot(*norms),
            unclipped=unclipped_vector(self._unclipped, parameters, gradients),
        )

    def _replay(self, passes: Sequence[ArrivedGradients]) -> None:
        """Compute what arrived in these passes again, in float64; passes without calls to replay have no exact part."""
        if self._options.dry_run:
            self._calls.forget()
            return
        otherwise = any(recomputed_otherwise(one.facts) for one in passes)
        exact = self._exact.compute(recomputed_otherwise=otherwise)
        for one in passes:
            found = exact.get(one.number)
            if found is not None:
                if otherwise:
                    _leave_out_hooked(found)
                one.exact = {id(parameter): gradient for parameter, gradient in found.gradients.items()}
                one.native = {id(parameter): gradient for parameter, gradient in found.native.items()}
                for parameter, reason in found.uncovered.items():
                    self._uncovered.setdefault(self._names.of_one(parameter), reason)

    def _complete(self, optimizer: Optimizer, *, skipped: bool) -> None:
        done = self._steps[id(optimizer)] = self._steps[id(optimizer)] + 1
        pending, self._pending = self._pending, None
        if self._recording and pending is not None:
            with torch.no_grad(), paused():
                facts = self._observers.tell(lambda one: one.after_step(optimizer, skipped=skipped))
            self._writer.write_step(
                *self._world,
                RecordedStep(**{**vars(pending), "skipped": skipped, "facts": {**pending.facts, **facts}}),
            )
            self._recorded.add(id(optimizer))
            self._windows.stepped(pending.optimizer, self._gradients.current)
            for one in parameters_of(optimizer):
                self._unclipped.pop(id(one), None)
        if not self._recording and not self._ended and done == self._options.after:
            self._start()
        elif self._recording and all(
            self._steps[id(one)] >= self._options.after + self._options.steps
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

    def _guarded(self, do: Callable[[], T]) -> T | None:
        """Do something of the recorder's; an error in it ends recording, and the script goes on."""
        try:
            return do()
        except NotEnoughMemoryError as error:
            self._error = self._error or str(error)
            self._stop()
            return None
        except Exception as error:
            self._error = self._error or _in_words(error)
            if self._recording:
                self._stop()
            return None


def _leave_out_hooked(found: ExactPass) -> None:
    """Leave out parameters whose gradients hooks of the script may change: they differ from a replay in any case."""
    for parameter in [one for one in found.native if has_gradient_hooks(one)]:
        del found.gradients[parameter], found.native[parameter]
        found.uncovered[parameter] = HOOKED


def _in_words(error: Exception) -> str:
    """Return what an error of the recorder is, for the verdict."""
    if isinstance(error, OSError):
        return (
            f"evidence cannot be written ({error.strerror or error}): free some space, or set TMPDIR to another folder"
        )
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _world() -> tuple[int, int]:
    """Return the rank of this process and the world's size; without a group, what the launcher says of the rank."""
    return rank_and_world() or (int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), 1)
