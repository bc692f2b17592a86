"""Gathers the whole weights, gradient and state of one parameter from the ranks that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.rank.memory_needed import bytes_of_step, is_free
from plumbline.check.rank.optimizer.optimizer_replay import NotReplayable
from plumbline.check.rank.optimizer.twin import StepInput, state_of
from plumbline.evidence.projection import fingerprint
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import dtensors, is_replicated, local, whole

Path = tuple[Any, ...]

SHARD, TENSOR, VALUE, OTHER = "shard", "tensor", "value", "other"
"""Kinds of values in a state: a DTensor, another tensor, a number or string, or one that cannot be sent to other
ranks."""


def described(optimizer: Optimizer, parameter: Tensor) -> Facts:
    """Describe what this rank holds of a parameter, as JSON values."""
    gradient = parameter.grad
    return {
        "shape": list(local(parameter).shape),
        "weights": _print(parameter),
        "gradient": None if gradient is None or gradient.is_sparse else _print(gradient),
        "state": [[list(path), *_described(value)] for path, value in _leaves(_state(optimizer, parameter))],
    }


class WholeInput:
    """Gathers one whole parameter from what the ranks hold of it.

    ``said`` has what each of the ``ranks`` has ``described``. All of them have to gather together.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor, ranks: Sequence[int], said: Sequence[Facts]) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._ranks = ranks
        self._said = said
        self._shape = parameter.shape
        self._is_sharded = local(parameter) is not parameter

    @property
    def has_own_gradients(self) -> bool:
        """Whether the ranks have different gradients, so that the step has to reduce them."""
        return not self._is_sharded and len({one["gradient"] for one in self._said}) > 1

    def require_memory(self) -> None:
        """Check that this rank has enough memory to gather everything, before other ranks wait for it in a collective.

        Raises:
            NotReplayable: too little memory is free.
        """
        states = max(len(one["state"]) for one in self._said)
        if not is_free(bytes_of_step(self._parameter, 1 + states), self._parameter.device):
            raise NotReplayable("too little memory is free on a rank to gather whole parameters and replay their steps")

    def gathered(self) -> StepInput:
        """Return the whole weights, gradient and state.

        Raises:
            NotReplayable: ranks hold different weights, or it is not known how they divide the state.
        """
        assert self._parameter.grad is not None
        if not self._is_sharded and len({one["weights"] for one in self._said}) > 1:
            raise NotReplayable(
                "this optimizer's step communicates, and the ranks hold different values of a parameter"
            )
        plan = list(self._plan())
        state = {path: self._value(path, how) for path, how in plan}
        return StepInput(whole(self._parameter.detach()), self._gradient(), _nested(state) if state else None)

    def _gradient(self) -> Tensor:
        """Return the gradient. If ranks have different ones, return their mean, as the step has to compute it.

        Of a gradient that every rank has whole, each rank steps its shard with the same part of its own copy.
        """
        assert self._parameter.grad is not None
        if self._is_sharded:
            own: Any = self._parameter.grad.detach()
            parameter: Any = self._parameter
            is_copied = is_replicated(own) and not is_replicated(parameter)
            own = own.redistribute(placements=parameter.placements) if is_copied else own
            return whole(own)
        gradient = self._parameter.grad.detach()
        if self.has_own_gradients:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            gradient /= len(self._ranks)
        return gradient

    def _plan(self) -> Iterator[tuple[Path, str | int]]:
        """Yield how to gather each value: a method's name, or the place of the rank that has it. All ranks agree."""
        states = [{tuple(path): entry for path, *entry in one["state"]} for one in self._said]
        for path in dict.fromkeys(path for one in states for path in one):
            yield path, self._how([one.get(path) for one in states], path)

    def _how(self, entries: Sequence[list[Any] | None], path: Path) -> str | int:
        having = [index for index, one in enumerate(entries) if one is not None]
        found = [one for one in entries if one is not None]
        kinds = {one[0] for one in found}
        is_everywhere = len(having) == len(entries)
        is_equal = is_everywhere and all(one == found[0] for one in found)
        if kinds == {VALUE} and all(one == found[0] for one in found):
            return "own" if is_everywhere else having[0]
        if kinds == {SHARD} and is_everywhere:
            return "dtensor"
        if kinds == {TENSOR}:
            if is_equal and found[0][3]:
                return "own"
            if is_everywhere and self._is_sharded and self._are_shards([one[1] for one in found]):
                return "shards"
            if is_everywhere and not self._is_sharded and self._are_rows([one[1] for one in found]):
                return "rows"
            if is_equal:
                return "own"
            if len(having) == 1 and len(self._ranks) == dist.get_world_size():
                return having[0]
        name = type(self._optimizer).__name__
        raise NotReplayable(f"it is not known how the ranks divide the state of {name}: {'.'.join(map(str, path))}")

    def _are_shards(self, shapes: Sequence[list[int]]) -> bool:
        own = [one["shape"] for one in self._said]
        return list(shapes) == own and any(one != list(self._shape) for one in own)

    def _are_rows(self, shapes: Sequence[list[int]]) -> bool:
        first = shapes[0]
        together = [len(shapes) * first[0], *first[1:]] if first else []
        return together == list(self._shape) and all(one == first for one in shapes)

    def _value(self, path: Path, how: str | int) -> Any:
        own: Any = dict(_leaves(_state(self._optimizer, self._parameter))).get(path)
        if how == "own":
            return own
        if how == "dtensor":
            return whole(own)
        if how == "shards":
            return whole(like_shard(own, self._parameter))
        if how == "rows":
            parts = [torch.empty_like(own) for _ in self._ranks]
            dist.all_gather(parts, own.contiguous())
            return torch.cat(parts)
        assert isinstance(how, int)
        kind, *rest = next(entry for at, *entry in self._said[how]["state"] if tuple(at) == path)
        if kind == VALUE:
            return rest[0]
        shape, _, _, dtype = rest
        given = torch.empty(shape, dtype=getattr(torch, dtype), device=self._parameter.device) if own is None else own
        sent = given.clone().contiguous()
        dist.broadcast(sent, src=self._ranks[how])
        return sent


def like_shard(tensor: Tensor, parameter: Any) -> Tensor:
    """Return a DTensor that is sharded like the parameter, from this rank's part of a tensor of the same shape."""
    shard: Tensor = dtensors().DTensor.from_local(
        tensor, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return shard


def _state(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    if local(parameter) is not parameter:
        return state_of(optimizer, parameter) or {}
    return state_of(optimizer, parameter, dist.get_rank(), dist.get_world_size()) or {}


def _described(value: Any) -> list[Any]:
    """Return the kind of a value and its properties: a tensor's shape, fingerprint, whether it is nonzero, dtype."""
    if isinstance(value, Tensor):
        own = local(value.detach())
        if type(own) not in (Tensor, torch.nn.Parameter) or own.is_sparse:
            return [OTHER]
        kind = TENSOR if own is value or type(value) in (Tensor, torch.nn.Parameter) else SHARD
        return [kind, list(own.shape), _print(value), bool(own.any()), str(own.dtype).removeprefix("torch.")]
    try:
        return [VALUE, json.loads(json.dumps(value))]
    except (TypeError, ValueError):
        return [OTHER]


def _print(tensor: Tensor) -> int:
    own = local(tensor.detach())
    return fingerprint(torch.view_as_real(own) if own.is_complex() else own)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, (*path, key))
    elif type(value) in (list, tuple) and any(isinstance(one, (Tensor, list, tuple, dict)) for one in value):
        for index, one in enumerate(value):
            yield from _leaves(one, (*path, index))
    else:
        yield path, value


def _nested(leaves: Mapping[Path, Any]) -> Any:
    """Return the state that has these leaves. Integer keys are positions in lists."""
    if set(leaves) == {()}:
        return leaves[()]
    below: dict[Any, dict[Path, Any]] = {}
    for (key, *rest), value in leaves.items():
        below.setdefault(key, {})[tuple(rest)] = value
    inner = {key: _nested(one) for key, one in below.items()}
    is_list = bool(inner) and sorted(map(str, inner)) == sorted(map(str, range(len(inner))))
    return (
        [inner[index] for index in range(len(inner))] if is_list and all(type(key) is int for key in inner) else inner
    )
