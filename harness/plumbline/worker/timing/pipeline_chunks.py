"""Records when the pipeline stages of this rank compute on which micro-batch, for any trainer.

A forward is an outermost call of a module, with the loss after it. A backward is a call of ``torch.autograd.backward``
or ``grad``. Tensors that a forward saves carry its stage and micro-batch, so a backward belongs to the forward whose
tensors it reads. A second backward of the same forward computes the gradients of weights, which some schedules defer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plumbline.evidence.timing import BACKWARD, FORWARD, WEIGHTS, Chunk, ChunkKind

Forward = tuple[int, int, int]
"""The number of the step, counted from 1, and of the stage of this rank and the micro-batch, counted from 0."""


class PipelineChunks:
    """Follows forwards and backwards between ``start`` and ``stop``; call ``end_step`` after each optimizer step.

    ``mark`` returns a mark of the clock. ``workload`` is the class with the job's ``loss``.
    """

    def __init__(self, mark: Callable[[], Any], workload: Any) -> None:
        self._mark = mark
        self._followed = (
            # Hooks would not run if the trainer leaves a call by an exception.
            (nn.Module, "__call__", self._as_forward),
            (workload, "loss", self._as_end_of_forward),
            (torch.autograd, "backward", self._as_backward),
            (torch.autograd, "grad", self._as_backward),
        )
        self._originals: list[Any] = []
        self._steps: list[list[tuple[ChunkKind, int, int, Any, Any]]] = [[]]
        self._stages: dict[nn.Module, int] = {}
        self._forwards: Counter[int] = Counter()
        self._differentiated: set[Forward] = set()
        self._inside = False
        self._read: Forward | None = None

    def start(self) -> None:
        for owner, name, follow in self._followed:
            self._originals.append(getattr(owner, name))
            setattr(owner, name, follow(getattr(owner, name)))

    def end_step(self) -> None:
        self._steps.append([])
        self._forwards.clear()

    def stop(self) -> None:
        for (owner, name, _), original in zip(self._followed, self._originals, strict=False):
            setattr(owner, name, original)
        self._originals = []

    def steps(self, times: Callable[[Sequence[Any]], Sequence[float]]) -> tuple[tuple[Chunk, ...], ...]:
        """Return the chunks of each completed step; ``times`` converts marks to seconds."""
        steps = self._steps[:-1]
        moments = iter(times([mark for step in steps for *_, begun, ended in step for mark in (begun, ended)]))
        return tuple(
            tuple(Chunk(kind, stage, number, next(moments), next(moments)) for kind, stage, number, *_ in step)
            for step in steps
        )

    def _as_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            stage = self._stages.setdefault(module, len(self._stages))
            forward = (len(self._steps), stage, self._forwards[stage])
            self._forwards[stage] += 1
            self._inside, begun = True, self._mark()
            try:
                with saved_tensors_hooks(lambda tensor: (forward, tensor), self._unpack):
                    return call(module, *args, **kwargs)
            finally:
                self._inside = False
                self._steps[-1].append((FORWARD, *forward[1:], begun, self._mark()))

        return followed

    def _as_end_of_forward(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def followed(*args: Any) -> Tensor:
            result = loss(*args)
            step = self._steps[-1]
            if not self._inside and step and step[-1][0] == FORWARD:
                step[-1] = (*step[-1][:-1], self._mark())
            return result

        return followed

    def _as_backward(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return differentiate(*args, **kwargs)
            self._inside, self._read, begun = True, None, self._mark()
            try:
                return differentiate(*args, **kwargs)
            finally:
                self._inside = False
                self._note_backward(begun, self._mark())

        return followed

    def _unpack(self, saved: tuple[Forward, Tensor]) -> Tensor:
        self._read, tensor = saved
        return tensor

    def _note_backward(self, begun: Any, ended: Any) -> None:
        if self._read is None:  # it was not for a stage
            return
        _, stage, number = self._read
        kind: ChunkKind = WEIGHTS if self._read in self._differentiated else BACKWARD
        self._differentiated.add(self._read)
        step = self._steps[-1]
        if kind == WEIGHTS and step and step[-1][:3] == (kind, stage, number):
            begun = step.pop()[3]  # several calls for weights are one chunk
        step.append((kind, stage, number, begun, ended))
