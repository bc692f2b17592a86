"""By what torch.distributed.pipelining divides the gradients of its stages: the number of micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from plumbline.recording.patching import attempt, wrap


class PipelineDivisors:
    """Follows the stages' own scaling of gradients, so that the loss is taken as the mean over micro-batches."""

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}
        self._installed = False

    def begin(self) -> None:
        """Forget what was scaled: new gradients arrive. The module is there once a script has made a stage."""
        self._factors.clear()
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None and not self._installed:
            self._installed = True
            wrap(getattr(stages, "_PipelineStageBase", None), "scale_grads", self._around)

    def of(self, parameter: Tensor) -> float:
        """Return the factor by which the gradient of a parameter was multiplied."""
        return self._factors.get(id(parameter), 1.0)

    def _around(self, original: Callable[..., Any], stage: Any, factor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, factor, *args, **kwargs)
        attempt(self._note, stage, factor)
        return result

    def _note(self, stage: Any, factor: Any) -> None:
        for one in stage.submod.parameters():
            self._factors[id(one)] = 1.0 / float(factor)
