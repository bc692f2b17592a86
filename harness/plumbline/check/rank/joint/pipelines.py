"""Follows stages of torch.distributed.pipelining: how they scale gradients, and backward passes in two halves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from plumbline.recording.backward_passes import roots_of
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.pause import rehearsal

CountedPass = Callable[[Sequence[Tensor], "Sequence[Tensor | None]"], AbstractContextManager[None]]
"""Counts what runs inside the block as a backward pass from these roots, with the gradients given there."""


class Pipelines:
    """Follows how stages scale gradients, so that these count as gradients of the mean over micro-batches.

    Zero-bubble schedules compute the gradients of a stage's inputs first and those of its weights later, without
    ``torch.autograd.backward``. The first half counts as a backward pass: gradients arrive at the stage's outputs in
    it. At their first step, stages run a forward, a loss and a backward pass to learn the shapes that they will
    exchange: these count as a ``rehearsal``. ``on_scaled`` is called with the parameters of a stage after the schedule
    has scaled their gradients, and with the factor.
    """

    def __init__(self) -> None:
        self.counted: CountedPass | None = None
        self.on_scaled: Callable[[Iterable[Tensor], float], None] = lambda parameters, factor: None
        self._factors: dict[int, float] = {}
        self._stages: dict[int, int] = {}
        self._installed = False

    def follow(self) -> None:
        """Follow stages from now on, if the script has imported them."""
        stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None and not self._installed:
            self._installed = True
            wrap(getattr(stages, "_PipelineStageBase", None), "scale_grads", self._around)
            wrap(stages, "stage_backward_input", self._around_inputs)
            for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
                wrap(getattr(stages, "PipelineStage", None), name, _rehearsed)

    def stepped(self) -> None:
        """Forget the factors: the optimizer has used the scaled gradients."""
        self._factors.clear()

    def factor(self, parameter: Tensor) -> float:
        """Return the factor by which the gradient of a parameter was multiplied."""
        return self._factors.get(id(parameter), 1.0)

    def stage_of(self, parameter: Tensor) -> int | None:
        """Return the index of the stage that holds a parameter, None where it is not known."""
        return self._stages.get(id(parameter))

    def _around(self, original: Callable[..., Any], stage: Any, factor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, factor, *args, **kwargs)
        attempt(self._note, stage, factor)
        return result

    def _note(self, stage: Any, factor: Any) -> None:
        scaled = 1.0 / float(factor)
        for one in stage.submod.parameters():
            self._factors[id(one)] = scaled
            self._stages[id(one)] = stage.stage_index
        self.on_scaled(stage.submod.parameters(), scaled)

    def _around_inputs(
        self, original: Callable[..., Any], outputs: Any, gradients: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.counted is None:
            return original(outputs, gradients, *args, **kwargs)
        with self.counted(*roots_of((outputs, gradients), {})):
            return original(outputs, gradients, *args, **kwargs)


def _rehearsed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with rehearsal():
        return original(*args, **kwargs)
