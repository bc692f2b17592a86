"""Checks the training of the calling process, for example in a notebook, an actor or a service."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.options import RecordingOptions, refuse_invalid_options, write_options
from plumbline.check.rank.evidence_writer import EvidenceWriter
from plumbline.check.rank.install import recorder_of
from plumbline.check.rank.recorder import TrainingRecorder
from plumbline.check.rank.store_exchange import SharedFolder, UnreachableFolderError, begin_recording
from plumbline.core.numbers import counted
from plumbline.recording.patching import Patches, classes_of
from plumbline.recording.process import rank_and_world

if TYPE_CHECKING:
    from plumbline.check.training_verdict import TrainingVerdict

_OPEN: WeakSet[TrainingRecorder] = WeakSet()


class Attachment:
    """Records the optimizer steps of this process until ``close`` is called or the requested number is recorded.

    ``attach`` creates it. It is a context manager that closes it on exit.
    """

    def __init__(self, optimizers: Sequence[Optimizer], options: RecordingOptions, folder: str | None) -> None:
        self._after = options.after
        self._folder = SharedFolder(partial(write_options, options=options), folder)
        self._recorder = recorder_of(options, EvidenceWriter(self._folder.find), {})
        self._patches = Patches()
        self._verdict: TrainingVerdict | None = None
        begin_recording()
        self._patches.open()
        try:
            self._recorder.install()
            self._patches.replace_imported()
            found = list(_made_before())
            others = [one for one in found if not isinstance(one, Optimizer)]
            unnamed = [one for one in found if isinstance(one, Optimizer)] if not optimizers else []
            self._recorder.follow(optimizers, unnamed, others)
        except BaseException:
            self._patches.close()
            raise
        _OPEN.add(self._recorder)
        weakref.finalize(self, self._folder.leave)  # also when the process ends

    @property
    def is_complete(self) -> bool:
        """Whether all requested steps are recorded on this rank, or recording has failed."""
        return self._recorder.is_over

    @property
    def rank(self) -> int:
        """The rank of this process, known even after its process group is destroyed."""
        return self._recorder.rank

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording and undo all patches. Call it between two steps. Calling it again does nothing."""
        if self._recorder not in _OPEN:
            return
        _OPEN.discard(self._recorder)
        self._recorder.finish()
        if not self._recorder.has_steps and rank_and_world() is not None:
            with suppress(OSError, RuntimeError, UnreachableFolderError):  # then the other ranks wait for this one
                self._recorder.write_end()
        self._patches.close()

    def verdict(self, *, wait: float | None = None) -> TrainingVerdict:
        """Close, wait until the other ranks of the process group have closed too, and judge what all of them recorded.

        One rank or every rank can call this. Each one that does computes the verdict itself.

        Args:
            wait: Seconds to wait for other ranks; by default 60 plus twice the time that recording took. If a rank has
                not closed by then, the verdict says what is missing.

        Raises:
            ValueError: ``wait`` is not a number of seconds.
            TraceError: an evidence file cannot be read.
        """
        if wait is not None and not (isinstance(wait, (int, float)) and wait >= 0):
            raise ValueError(f"wait={wait!r} must be a number of seconds, 0 or more, or None")
        from plumbline.check.judge.script_checks import judged_trainings
        from plumbline.check.training_verdict import TrainingVerdict

        if self._verdict is None:
            self.close()
            error = str(self._recorder.progress["error"])
            trainings = []
            if self._folder.path is not None:
                self._recorder.wait_for_ends(wait)
                trainings = judged_trainings(Path(self._folder.path))
            obstacle = (error and f"recording failed: {error}") or ("" if trainings else self._why_none())
            self._verdict = TrainingVerdict(tuple(trainings), obstacle)
            self._folder.leave()
        return self._verdict

    def _why_none(self) -> str:

        taken = self._recorder.progress["steps"]
        assert isinstance(taken, int)
        why = f"the optimizers of this process have completed {counted(taken, 'step')} since attach() was called"
        if self._after:
            why += f", and it skips the first {counted(self._after, 'step')} of each optimizer"
        return f"{why}; call attach() in the process that trains, before its last steps"


def attach(
    *optimizers: Optimizer, steps: int = 4, after: int = 0, objective: str = "", folder: str | None = None
) -> Attachment:
    """Record the next optimizer steps of this process, to judge them as ``plumbline check`` judges a command's steps.

    Call it on every rank, before the model is made or at least between an optimizer step and the next forward::

        with plumbline.attach(steps=4) as attached:
            train()
        print(attached.verdict())

    Args:
        optimizers: Existing optimizers to record from their next step on; by default all that exist. Optimizers created
            later are always recorded.
        steps: Number of steps to record of each optimizer.
        after: Number of steps of each optimizer to skip first.
        objective: The objective that the training is declared to optimise, as in ``plumbline check --objective``.
        folder: Where ranks write what they record; by default the temporary folder. Ranks on several machines need a
            folder that all of them share.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            hint = "attach(*optimizers)" if isinstance(one, (list, tuple)) else "attach(optimizer)"
            raise TypeError(f"attach() takes optimizers, not {type(one).__name__}: write {hint}")
    refuse_invalid_options(steps=steps, after=after, objective=objective)
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"folder={folder!r} is not a folder: create it first")
    return Attachment(optimizers, RecordingOptions(steps, after, objective=objective), folder)


def _made_before() -> Iterator[Any]:
    """Yield existing optimizers with step hooks, DDP modules, schedulers, meshes and process groups, in no order."""
    of_meshes: set[int] = set()
    c10d: Any = torch.distributed
    meshes = [c10d.device_mesh.DeviceMesh] if c10d.is_available() else []
    kinds = [kind for base in (DistributedDataParallel, LRScheduler, *meshes) for kind in classes_of(base)]
    # A wrapper without hooks calls the step of the wrapped optimizer.
    kinds += [kind for kind in classes_of(Optimizer) if getattr(kind.step, "hooked", False)]
    known = set(map(id, kinds))
    found: list[weakref.ref[Any]] = [weakref.ref(one) for one in gc.get_objects() if id(type(one)) in known]
    if found:
        gc.collect()  # garbage of earlier trainings that only some ranks hold would number their optimizers differently
    for each in found:
        one: Any = each()
        if one is not None:
            yield one
            if hasattr(one, "get_all_groups"):
                with suppress(Exception):  # this rank may be outside the mesh, or the group is gone
                    of_meshes.update(map(id, one.get_all_groups()))
    # A private name: if this version of torch lacks it, groups created before are unknown.
    for group in getattr(getattr(getattr(c10d, "distributed_c10d", None), "_world", None), "pg_map", ()):
        if id(group) not in of_meshes:
            yield group


def _forked() -> None:
    for recorder in _OPEN:
        recorder.abandon()


os.register_at_fork(after_in_child=_forked)
