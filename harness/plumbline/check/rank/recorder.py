"""Records a process's optimizer steps: the gradients that arrived, those that the optimizer received, and facts."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.evidence.training import RecordedStep
from plumbline.check.rank.evidence_writer import EvidenceWriter
from plumbline.check.rank.joint.steps import JointSteps
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.local_gradients import ArrivedGradients
from plumbline.check.rank.master_layout import MasterLayout, MasterLayouts
from plumbline.check.rank.memory_needed import require_memory
from plumbline.check.rank.observers.ties import TieObserver
from plumbline.check.rank.optimizer.clipping import ClippingObserver
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer_gradients import (
    FlatGradients,
    gathered,
    has_own_hooks,
    received,
    recorded_parameters,
    vector,
)
from plumbline.check.rank.own_errors import OwnErrors
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.check.rank.tensor_digest import unchanged
from plumbline.check.rank.training_passes import NameObserver, TrainingPasses
from plumbline.check.rank.unclipped import UnclippedGradients
from plumbline.devices.freed_memory import keep_freed_memory, return_freed_memory
from plumbline.evidence.projection import free_buffers
from plumbline.recording.grad_scaler import skips_in_its_kernel
from plumbline.recording.observer import Observer, Observers
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.parameters import ParameterNames, follow_added_parameters, parameters_of
from plumbline.recording.pause import paused
from plumbline.recording.process import rank_and_world
from plumbline.recording.sharding import local

END_TIMEOUT_S = 60.0
"""Seconds that a finished rank waits for the others, in addition to twice its own recording time."""


class TrainingRecorder:
    """Follows the optimizers of this process from step ``after`` on, for the requested number of steps.

    These steps are the first window. With ``every``, later windows of one step follow. Recording ends early at the
    first error of the recorder, which the script never sees.
    """

    def __init__(
        self,
        options: RecordingOptions,
        writer: EvidenceWriter,
        names: ParameterNames,
        loss_scale: LossScale,
        clipping: ClippingObserver,
        others: Sequence[Observer] = (),
        sample: ParameterSample | None = None,
    ) -> None:
        self._options = options
        self._sample = sample = sample or ParameterSample(0)
        self._has_memory = False
        self._first_writer = self._writer = writer
        self._window = options.after, options.after + options.steps
        self._errors = OwnErrors(self._stop_if_recording)
        self._names = names
        self._optimizers = KnownOptimizers(names)
        self._layouts = MasterLayouts(names, self._optimizers)
        self._flat = FlatGradients(names)
        self._unclipped = UnclippedGradients(self._optimizers, names, sample, loss_scale)
        joint = JointSteps(self._optimizers, names, self._unclipped, self._layouts)
        self._observers = Observers((NameObserver(names), loss_scale, clipping, self._unclipped, joint, *others))
        self._passes = TrainingPasses(
            options,
            sample,
            self._optimizers,
            names,
            self._observers,
            loss_scale,
            self._errors,
            joint,
            self._layouts,
        )
        loss_scale.on_skipped = lambda optimizer: self._errors.keep(lambda: self._skip(optimizer))
        clipping.on_clipping, clipping.on_clipped = self._unclipped.note, self._unclipped.note_clipped
        clipping.on_edited = self._unclipped.keep_after_backward
        joint.multiplied_by_hand, joint.pipelines.on_scaled = clipping.multiplied_by_hand, clipping.scaled
        joint.is_tied = next((one.is_tied for one in others if isinstance(one, TieObserver)), joint.is_tied)
        self._recording = False
        self._ended = False
        self._finished = False
        self._later: set[str] = set()
        self._began = 0.0
        self._pending: RecordedStep | None = None
        self._makes_state = False  # whether the running step only creates state, before any backward pass
        self._pid = os.getpid()
        self._world = (0, 1)

    def install(self) -> None:
        """Follow every optimizer that the script makes."""
        self._passes.install()
        OptimizerSteps(self).install(outside_graphs=True)
        follow_added_parameters(lambda optimizer: self._errors.keep(lambda: self._note_parameters(optimizer)))
        self._errors.keep(lambda: self._observers.tell(lambda one: one.install()))

    def follow(self, named: Sequence[Optimizer], found: Sequence[Optimizer], others: Iterable[Any] = ()) -> None:
        """Follow optimizers that were created before ``install``, and tell the observers of ``others``.

        Optimizers in ``found`` can belong to other trainings. If gradients are left from before, their backward passes
        are unknown, so the next step is skipped and recording starts with the one after it.
        """
        known = [*named, *found]
        has_gradients = any(one.grad is not None for optimizer in known for one in parameters_of(optimizer))
        if has_gradients and not self._window[0]:
            self._window = 1, 1 + self._options.steps

        def note() -> None:
            for one in others:
                self._observers.tell(methodcaller("found", one))
            for optimizer in found:
                self._optimizers.add(optimizer, found=True)
                self._observers.tell(methodcaller("optimizer_made", optimizer))
            for optimizer in named:
                self._note(optimizer)
            if known and not self._window[0]:
                self._start()

        self._errors.keep(note)

    def abandon(self) -> None:
        """Stop recording and write nothing, because this process is a fork of the recorded one."""
        self._stop()
        self._finished = True

    def write_end(self) -> None:
        """Write the end of a rank that has recorded no step, so that other ranks do not wait for it."""
        self._world = _world()
        self._writer.write_end(self._world[0], {}, self._errors.first)

    def wait_for_ends(self, seconds: float | None = None) -> None:
        """Wait until all ranks of the group have written their evidence, or the time for it is over."""
        recorded = time.monotonic() - self._began if self._began else 0.0
        self._writer.wait_for_ends(self._world[1], END_TIMEOUT_S + 2 * recorded if seconds is None else seconds)

    def forget(self) -> None:
        """In a forked process, record its own steps, unless the parent has already begun to step."""
        if self._optimizers.have_begun:
            self.abandon()
        else:
            self._pid = os.getpid()

    @property
    def is_over(self) -> bool:
        return self._ended

    @property
    def rank(self) -> int:
        """The rank that this process has, or had when it recorded its last step."""
        return self._world[0] if self.has_steps else _world()[0]

    @property
    def has_steps(self) -> bool:
        return self._first_writer.has_steps

    @property
    def progress(self) -> dict[str, object]:
        """Counts of what the recorder saw, and its own error, for a process that leaves no steps."""
        return {**self._optimizers.progress, "passes": self._passes.count, "error": self._errors.first}

    def finish(self) -> None:
        """Write facts about the whole process, right after its last recorded step in case the process dies."""
        if os.getpid() != self._pid:
            return
        if self._finished:
            if self._later:
                self._write_later()
            return
        self._finished = True
        self._stop()
        if self._later:
            self._write_later()
        if self._writer.has_steps:
            try:
                facts = {
                    **self._observers.final_facts(),
                    "uncovered": self._passes.uncovered,
                    "unstepped": self._optimizers.unstepped(),
                }
                self._writer.write_end(self._world[0], facts, self._errors.first)
            except OSError as error:
                print(f"plumbline check: the evidence cannot be written: {error}", file=sys.stderr)
                return
            if self._writer is self._first_writer:
                self._observers.tell(lambda one: one.after_recording(partial(self._write_later, one.name)))

    def _write_later(self, *changed: str) -> None:
        """Write the facts of observers that go on after the recorded steps: of those that ``changed`` now or before."""
        if os.getpid() == self._pid:
            self._later.update(changed)
            facts = {**self._observers.final_facts(self._later), "late": self._optimizers.late}
            with suppress(OSError):  # the check may have ended before the process, and removed its folder
                self._first_writer.write_later(self._world[0], facts)

    def _note_parameters(self, optimizer: Optimizer) -> None:
        if not self._finished:
            self._names.refresh()  # they may have been added to modules after their first call
        self._note(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        if self._finished or optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        self._observers.tell(lambda one: one.optimizer_made(optimizer))
        if not self._window[0]:
            self._start()

    def _note_late(self, optimizer: Optimizer) -> None:
        if self._finished and self._optimizers.note_late(optimizer):
            self._write_later()

    def _start(self) -> None:
        if not self._recording and not self._ended:
            self._recording = True
            self._began = time.monotonic()
            keep_freed_memory()
            self._passes.start()
            self._observers.tell(lambda one: one.start())

    def _stop(self) -> None:
        self._stop_if_recording()
        self._ended = True

    def _stop_if_recording(self) -> None:
        if self._recording:
            self._recording = False
            self._ended = True
            self._passes.stop()
            self._errors.keep(self._observers.stop)
            free_buffers()
            return_freed_memory()

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._makes_state = not self._passes.count and not has_closure and _steps_with_zeros(optimizer)
        if not self._makes_state:
            self._errors.keep(lambda: self._note_late(optimizer) if self._ended else self._count(optimizer))

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if self._recording and not self._makes_state:
            self._errors.keep(lambda: self._prepare(optimizer))

    def step_ends(self, optimizer: Optimizer) -> None:
        if not self._ended and not self._makes_state:
            skipped = self._errors.keep(lambda: skips_in_its_kernel(optimizer))
            self._errors.keep(lambda: self._complete(optimizer, skipped=bool(skipped)))

    def _count(self, optimizer: Optimizer) -> None:
        """Count a step that begins. End the recording, or the process, if the options ask for that at this step."""
        self._note(optimizer)
        if not self._optimizers.has_begun(optimizer):
            with torch.no_grad(), paused():
                self._observers.tell(lambda one: one.first_step(optimizer))
        self._optimizers.begin(optimizer)
        if 0 < self._options.interrupt_after <= self._optimizers.taken(optimizer):
            self._interrupt()
        if self._recording and self._optimizers.taken(optimizer) >= self._window[1]:
            if self._options.every:
                self.finish()
                self._await_window(optimizer)
            else:
                self._stop()

    def _skip(self, optimizer: Optimizer) -> None:
        self._count(optimizer)
        if self._recording:
            self._prepare(optimizer)
            self._complete(optimizer, skipped=True)

    def _prepare(self, optimizer: Optimizer) -> None:
        self._world = _world()
        parameters = parameters_of(optimizer)
        self._sample.add(parameters)
        if not self._has_memory and self._options.replays and not self._options.dry_run:
            require_memory(self._names.roots, parameters, self._sample, self._options)
            self._has_memory = True
        number = self._optimizers.number(optimizer)
        with torch.no_grad(), paused():
            own, others = self._passes.take(optimizer, number)
            layout = self._layouts.of(number)
            if layout is None:
                step = self._own(optimizer, number, own, others)
            else:
                step = self._in_pieces(optimizer, number, layout, own, others)
            with unchanged():
                self._observers.tell(lambda one: one.before_step(optimizer))
        unoptimized = self._optimizers.unoptimized(self._layouts.stepped, with_digests=self._world[1] > 1)
        hooks = {
            "gradient_hooks": sum(map(has_own_hooks, parameters)),
            "tensor_hooks": sum(map(self._passes.changes_arriving, parameters)),
        }
        self._pending = replace(step, facts={**hooks, "unoptimized": unoptimized, **step.facts})

    def _own(
        self, optimizer: Optimizer, number: int, own: Sequence[ArrivedGradients], others: Sequence[ArrivedGradients]
    ) -> RecordedStep:
        """Return the step of an optimizer that updates the model's own parameters."""
        parameters, units = parameters_of(optimizer), self._flat.units(optimizer)
        whole = gathered(units, lambda one: one.grad)
        found = [
            received(optimizer, one, whole.get(id(one), one.grad), sampled=self._sample.has(one)) for one in parameters
        ]
        gradients = [one for one, _ in found]
        unclipped, replaced, after_backward = self._unclipped.vectors(parameters, gradients, units)
        return RecordedStep(
            number,
            self._optimizers.taken(optimizer),
            recorded_parameters(optimizer, self._names, self._sample, accumulated=len(own) + len(others) > 1),
            torch.cat(gradients),
            tuple(vector(one, parameters, self._sample) for one in own),
            tuple(vector(one, parameters, self._sample) for one in others),
            norm=math.hypot(*(norm for _, norm in found)),
            unclipped=unclipped,
            replaced=replaced,
            after_backward=after_backward,
        )

    def _in_pieces(
        self,
        optimizer: Optimizer,
        number: int,
        layout: MasterLayout,
        own: Sequence[ArrivedGradients],
        others: Sequence[ArrivedGradients],
    ) -> RecordedStep:
        """Return the step of an optimizer that updates copies of pieces of the model's parameters."""
        layout = layout.on(optimizer)
        found = layout.received(optimizer)
        gradients = [one for one, _ in found]
        return RecordedStep(
            number,
            self._optimizers.taken(optimizer),
            layout.recorded(optimizer),
            torch.cat(gradients),
            tuple(map(layout.vector, own)),
            tuple(map(layout.vector, others)),
            facts={"masters": layout.facts(found, self._layouts.stale_before(number, layout))},
            norm=math.hypot(*(norm for _, norm in found)),
            unclipped=layout.unclipped(self._unclipped.whole, gradients),
        )

    def _complete(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self._optimizers.end(optimizer)
        pending, self._pending = self._pending, None
        if self._recording and pending is not None:
            with torch.no_grad(), paused(), unchanged():
                facts = self._observers.tell(lambda one: one.after_step(optimizer, skipped=skipped))
            self._writer.write_step(*self._world, replace(pending, skipped=skipped, facts={**pending.facts, **facts}))
            self._optimizers.record(optimizer)
            self._passes.stepped(pending.optimizer)
        if not self._recording and not self._ended and self._optimizers.taken(optimizer) == self._window[0]:
            self._start()
        elif self._recording and self._is_over(optimizer):
            self.finish()
            if self._options.stop:
                self._end_process()
            elif self._options.every:
                self._await_window(optimizer)

    def _is_over(self, optimizer: Optimizer) -> bool:
        """Return whether the window is complete. The first one waits for all optimizers that have begun to step."""
        if self._writer is self._first_writer:
            return self._optimizers.have_taken(self._window[1])
        return self._optimizers.taken(optimizer) >= self._window[1]

    def _await_window(self, optimizer: Optimizer) -> None:
        """Begin the next window when an optimizer has taken the next multiple of ``every`` steps."""
        every = self._options.every
        begin = (self._optimizers.taken(optimizer) // every + 1) * every
        self._window = begin, begin + 1
        self._writer = self._first_writer.of_window(begin)
        self._ended = self._finished = False

    def _interrupt(self) -> None:
        """End the process like a crash, but together with the other ranks, so that all have saved their checkpoints."""
        rank, ranks = _world()
        self._first_writer.wait_for_interrupted(rank, ranks, END_TIMEOUT_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _end_process(self) -> None:
        """End the process together with all others of its group, because slower ranks may still need it."""
        self.wait_for_ends()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _steps_with_zeros(optimizer: Optimizer) -> bool:
    """Return whether gradients exist and all are zero, as when a trainer steps once to create the optimizer's state."""
    gradients = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
    return bool(gradients) and not any(bool(local(one).any()) for one in gradients)


def _world() -> tuple[int, int]:
    """Return this process's rank and the world size; without a process group, the launcher's rank and 1."""
    return rank_and_world() or (int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))), 1)
