"""Notes how many weights in 16 bits an optimizer step changes: an update that is too small rounds to nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.optimizer_replay import groups_of, is_of_torch, stepping
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import local

_DTYPES = (torch.bfloat16, torch.float16)


_DECOUPLED = tuple(kind for name in ("AdamW", "Muon") if (kind := getattr(torch.optim, name, None)) is not None)
"""Optimizers of torch whose weight decay is a step of its own."""


class MovedWeightObserver(Observer):
    """Notes for each step ``due`` and ``moved``: how many 16-bit entries have a gradient, and how many of them changed.

    ``decays`` and ``decayed``: how many nonzero entries torch's optimizers multiply by one minus the weight decay, and
    how many of these products are not rounded to the same number. Memory: a copy of the weights in 16 bits.
    """

    name = "moved-weights"

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._decays = (0, 0)

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
        self._decays = _decays(optimizer)

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        kept, self._before = self._before, []
        if not kept or skipped:
            return None
        moved = sum(int(((local(one.detach()) != before) & has).sum()) for one, before, has in kept)
        decays, decayed = self._decays
        due = sum(int(has.sum()) for _, _, has in kept)
        return {"due": due, "moved": moved, "decays": decays, "decayed": decayed}

    def stop(self) -> None:
        self._before = []


def _decays(optimizer: Optimizer) -> tuple[int, int]:
    """Return how many nonzero 16-bit entries have a decoupled weight decay, and how many of them it changes.

    Only torch's own optimizers are followed: others may keep the weights in float32. A fused step rounds only once,
    after the update.
    """
    decays = decayed = 0
    kind = type(stepping(optimizer)).__name__
    for group in groups_of(optimizer) if is_of_torch(stepping(optimizer)) else ():
        is_decoupled = kind in _DECOUPLED or group.get("decoupled_weight_decay")
        if not is_decoupled or group.get("fused") or not (decay := group["lr"] * group.get("weight_decay", 0)):
            continue
        factor = 1 - decay
        for one in (local(each.detach()) for each in group["params"] if each.grad is not None):
            if one.dtype in _DTYPES:
                decays += int(one.count_nonzero())
                decayed += int((one * factor != one).sum())
    return decays, decayed
