"""Notes where an optimizer's state is another one at the beginning of a step than at the end of the step before."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.optimizer_replay import stepping
from plumbline.evidence.projection import fingerprint
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import local


class StateContinuity(Observer):
    """Notes fingerprints of the state of each parameter: of tensors of several entries that are not all zero.

    Facts of a step: ``held``, the numbers of the parameters that have such a state before it; ``changed``, for each
    whose state changed since the last step its number and both fingerprints, 0 where there is no such state.
    """

    name = "optimizer-state"

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()
        self._facts: WeakKeyDictionary[Optimizer, Facts] = WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the state with that after the last step."""
        now = _states(optimizer)
        last = self._last.get(optimizer, now)
        numbers = {id(one): number for number, one in enumerate(parameters_of(optimizer))}
        changed = [[numbers[one], last[one], now[one]] for one in now if one in last and last[one] != now[one]]
        held = [numbers[one] for one, state in now.items() if state or last.get(one)]
        self._facts[optimizer] = {"held": held, "changed": changed}

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        self._last[optimizer] = _states(optimizer)
        return self._facts.pop(optimizer, None)

    def stop(self) -> None:
        """Forget the states."""
        self._last.clear()
        self._facts.clear()


def _states(optimizer: Optimizer) -> dict[int, int]:
    """Return the fingerprint of each parameter's state, by its identity."""
    states = stepping(optimizer).state
    return {id(one): _fingerprint(states[one]) if one in states else 0 for one in parameters_of(optimizer)}


def _fingerprint(state: object) -> int:
    tensors = [local(one.detach()) for one in tree_leaves(state) if isinstance(one, Tensor)]
    prints = [_print(one) for one in tensors if one.numel() > 1 and one.layout is torch.strided and bool(one.any())]
    return int.from_bytes(hashlib.sha256(repr(prints).encode()).digest()[:6], "big") if prints else 0


def _print(tensor: Tensor) -> int:
    return fingerprint(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
