"""Notes what a checkpoint must restore: weights, the optimizer's state and its settings, before each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.optimizer.optimizer_replay import stepping
from plumbline.check.rank.tensor_digest import digest_and_projection, tensor_digest
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import is_shard, local


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
