"""Hooks into torch's optimizers and GradScaler, for recording and for timing."""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.trace import RankTrace
from plumbline.recording.grad_scaler import follow_scaled_steps
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.process import rank_and_world


class StepCounter(Protocol):
    """Memory for the number of completed steps: eight bytes, little-endian."""

    def __setitem__(self, place: slice, number: bytes, /) -> None: ...


class StepHooks(ABC):
    """Follows the optimizer steps of this process, from ``install`` until the process ends.

    ``done`` is updated after each step; it may be memory that outlives the process.
    """

    def __init__(self, done: StepCounter) -> None:
        self.world_size = 1
        self._done = done
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

    @property
    def has_steps(self) -> bool:
        return False

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

    def _count(self, steps: int) -> None:
        self._done[:8] = steps.to_bytes(8, "little")

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: B027
        """Note the beginning of a step."""

    def gradients_ready(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Note the gradients of a step; if it has a closure, the gradients that the closure has computed."""

    @abstractmethod
    def step_ends(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def _scaled_step(self, scaler: Any, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call the ``step`` of an enabled GradScaler, which may skip the optimizer's step; return its result."""


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
