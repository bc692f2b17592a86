"""Checks the training of the process that asks for it: in a notebook, an actor, a service."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.options import OBJECTIVES, RecordingOptions, write_options
from plumbline.check.rank.evidence_writer import EvidenceWriter
from plumbline.check.rank.install import recorder_of
from plumbline.check.rank.shared_folder import SharedFolder
from plumbline.recording.patching import Patches

if TYPE_CHECKING:
    from plumbline.check.training_verdict import TrainingVerdict

_NUMBERS = itertools.count(1)


class Attachment:
    """Records the optimizer steps of this process until ``close``, or until as many are recorded as were asked for.

    It is a context manager, which closes it. ``attach`` makes it.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...], options: RecordingOptions, folder: str | None) -> None:
        self._folder = SharedFolder(str(next(_NUMBERS)), partial(write_options, options=options), folder)
        self._recorder = recorder_of(options, EvidenceWriter(self._folder.find), {})
        self._patches = Patches()
        self._verdict: TrainingVerdict | None = None
        with self._patches.collected():
            self._recorder.install()
        self._patches.replace_imported()
        found = list(_made_before())
        made = optimizers or tuple(one for one in found if isinstance(one, Optimizer))
        self._recorder.follow(made, [one for one in found if not isinstance(one, Optimizer)])
        weakref.finalize(self, self._folder.leave)  # also when the process ends

    @property
    def is_complete(self) -> bool:
        """Whether all steps that were asked for are recorded on this rank, or recording has failed."""
        return self._recorder.is_over

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Record no more, and put back all that was replaced. Call it between two steps; again, it does nothing."""
        self._recorder.finish()
        self._patches.take_back()

    def verdict(self) -> TrainingVerdict:
        """Close, wait for the other ranks of the process group to close, too, and judge what all have recorded.

        Every rank may ask, or one of them; each that asks computes it.

        Raises:
            TraceError: a file of evidence cannot be read.
        """
        from plumbline.check.judge.script_checks import judged_trainings
        from plumbline.check.training_verdict import TrainingVerdict

        if self._verdict is None:
            self.close()
            error = str(self._recorder.progress["error"])
            if self._folder.path is None or not self._recorder.has_steps:
                self._verdict = TrainingVerdict((), error and f"recording failed: {error}")
            else:
                self._recorder.wait_for_ends()
                trainings = judged_trainings(Path(self._folder.path))
                self._verdict = TrainingVerdict(tuple(trainings), error and f"recording ended early: {error}")
            self._folder.leave()
        return self._verdict


def attach(
    *optimizers: Optimizer, steps: int = 4, after: int = 0, objective: str = "", folder: str | None = None
) -> Attachment:
    """Record the next optimizer steps of this process, to judge them as ``plumbline check`` judges those of a command.

    Call it on every rank, before the model is made or at least between an optimizer step and the next forward::

        with plumbline.attach(steps=4) as attached:
            train()
        print(attached.verdict())

    Args:
        optimizers: Those that exist and are to be recorded from their next step on; by default all that exist. An
            optimizer that is made later is recorded in any case.
        steps: Steps of each optimizer to record.
        after: Steps to skip first.
        objective: What the training is declared to optimise, as ``plumbline check --objective`` takes it.
        folder: Where ranks write what they record; by default the temporary folder. Ranks on several machines need one
            that all of them share.

    Raises:
        ValueError: an argument has no meaning.
    """
    if steps < 1 or after < 0:
        raise ValueError(f"attach was given steps={steps} and after={after}: record 1 step or more, after 0 or more")
    if objective and objective not in OBJECTIVES:
        raise ValueError(f"attach was given objective={objective!r}: choose one of {', '.join(OBJECTIVES)}")
    return Attachment(optimizers, RecordingOptions(steps, after, objective=objective), folder)


def _made_before() -> Iterator[Any]:
    """Yield the optimizers that torch tells of their steps, and what observers want to know of, in no order."""
    kinds = DistributedDataParallel, LRScheduler
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, Optimizer):
            if getattr(kind.step, "hooked", False):  # a wrapper around another one steps through that
                yield one
        elif issubclass(kind, kinds) or kind.__name__ == "DeviceMesh":
            yield one
    c10d: Any = getattr(torch.distributed, "distributed_c10d", None)
    # A private name: where a version of torch lacks it, groups made before are not known.
    yield from getattr(getattr(c10d, "_world", None), "pg_map", ())
