"""Notes an optimizer's state before each step: whether it is that after the last step, and what to restore."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.optimizer_replay import stepping
from plumbline.check.rank.tensor_digest import digest_and_projection, sampled, tensor_digest, weights_prints
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import is_shard, local

SAMPLED = 2**13
"""Entries of a tensor that are compared: what resets, restores or exchanges a state changes most of its rows."""


class StateContinuity(Observer):
    """Notes fingerprints of each parameter's state. Only tensors of several entries that are not all zero count.

    Facts of a step: ``held``, the numbers of the parameters that have such a state before the step, or had it after the
    last one; ``changed``, for each parameter whose state changed since the last step, its number and both fingerprints,
    0 without such a state; ``anew``, the numbers of the parameters without such a state that another optimizer of this
    class stepped, and had a state for, before this optimizer was created.
    """

    name = "optimizer-state"

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()
        self._facts: WeakKeyDictionary[Optimizer, Facts] = WeakKeyDictionary()
        self._kinds: Any = WeakTensorKeyDictionary()  # parameter with a state: the class of its last optimizer
        self._replaces: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Note which parameters the optimizer takes over from another one of its class."""
        kind, parameters = type(optimizer), parameters_of(optimizer)
        self._replaces[optimizer] = {n for n, one in enumerate(parameters) if self._kinds.get(one) is kind}

    def before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._facts:  # its closure recomputes gradients in the same step
            return
        now = _states(optimizer)
        last = self._last.get(optimizer, now)
        numbers = {id(one): number for number, one in enumerate(parameters_of(optimizer))}
        changed = [[numbers[one], last[one], now[one]] for one in now if one in last and last[one] != now[one]]
        held = [numbers[one] for one, state in now.items() if state or last.get(one)]
        replaced = self._replaces.pop(optimizer, set())
        anew = [number for one, number in numbers.items() if number in replaced and not now[one]]
        self._facts[optimizer] = {"held": held, "changed": changed, "anew": anew}

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        now = self._last[optimizer] = _states(optimizer)
        self._kinds.update({one: type(optimizer) for one in parameters_of(optimizer) if now[id(one)]})
        return self._facts.pop(optimizer, None)

    def stop(self) -> None:
        self._last.clear()
        self._facts.clear()
        self._kinds.clear()
        self._replaces.clear()


def _states(optimizer: Optimizer) -> dict[int, int]:
    states = stepping(optimizer).state
    held = {id(one): _tensors(states[one]) if one in states else [] for one in parameters_of(optimizer)}
    prints = iter(weights_prints([tensor for each in held.values() for tensor in each]))
    return {one: _digest([next(prints) for _ in each]) for one, each in held.items()}


def _tensors(state: object) -> list[Tensor]:
    """Return some entries of each tensor of a state that has several and is not all zero."""
    every = (local(one.detach()) for one in tree_leaves(state) if isinstance(one, Tensor))
    strided = ((one, sampled(one, SAMPLED)) for one in every if one.numel() > 1 and one.layout is torch.strided)
    return [some for one, some in strided if is_any(some) or is_any(one)]


def is_any(tensor: Tensor) -> bool:
    """Return what ``any`` does. The largest entry is found far faster, and usually tells."""
    is_ordered = not tensor.is_complex() and tensor.element_size() > 1
    return (is_ordered and bool(tensor.amax())) or bool(tensor.any())


def _digest(prints: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(prints).encode()).digest()[:6], "big") if prints else 0


class ResumableStateObserver(Observer):
    """Notes ``weights``, ``state`` and ``groups`` before each step.

    ``weights`` has a digest and a projection for each parameter, and whether they belong to a shard. ``state`` has, for
    each parameter, a digest of each tensor by its key, and each single number as it is. ``groups`` has the numbers
    among the settings of each parameter group.
    """

    name = "resumable-state"

    def __init__(self) -> None:
        self._facts: Facts = {}

    def before_step(self, optimizer: Optimizer) -> None:
        parameters, states = parameters_of(optimizer), stepping(optimizer).state
        self._facts = {
            "weights": [(*digest_and_projection(local(one.detach())), is_shard(one)) for one in parameters],
            "state": [_noted(states[one]) if one in states else {} for one in parameters],
            "groups": [_noted({k: v for k, v in one.items() if k != "params"}) for one in optimizer.param_groups],
        }

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        facts, self._facts = self._facts, {}
        return facts


def _noted(values: dict[str, Any]) -> Facts:
    found = {name: _value(one) for name, one in values.items()}
    return {name: one for name, one in found.items() if one is not None}


def _value(one: Any) -> float | str | None:
    if isinstance(one, (bool, int, float)):
        return float(one)
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return None
    own = local(one.detach())
    return float(own) if own.numel() == 1 and not own.is_complex() else tensor_digest(own)
