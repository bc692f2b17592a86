"""Notes how many weights in 16 bits an optimizer step changes: an update that is too small rounds to nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import local

_DTYPES = (torch.bfloat16, torch.float16)


class MovedWeightObserver(Observer):
    """Notes for each step ``due`` and ``moved``: how many 16-bit entries have a gradient, and how many of them changed.

    Memory: a copy of the weights in 16 bits.
    """

    name = "moved-weights"

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep the weights that have a gradient, and where it is not zero."""
        given = [
            (one, local(one.grad))
            for one in parameters_of(optimizer)
            if one.dtype in _DTYPES and one.grad is not None and one.grad.layout is torch.strided
        ]
        self._before = [
            (one, local(one.detach()).clone(), gradient != 0)
            for one, gradient in given
            if gradient.shape == local(one).shape
        ]

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        kept, self._before = self._before, []
        if not kept or skipped:
            return None
        moved = sum(int(((local(one.detach()) != before) & has).sum()) for one, before, has in kept)
        return {"due": sum(int(has.sum()) for _, _, has in kept), "moved": moved}

    def stop(self) -> None:
        self._before = []
