"""Flat parts of parameters, as a subject declares them: where this rank's weights and gradients lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart


@dataclass(frozen=True, eq=False)
class FlatShard:
    """A rank's run of entries of a flattened parameter of ``shape``, from ``begin`` on.

    ``ranks`` are those whose runs make up the parameter, it included.
    """

    values: Tensor
    begin: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class FlatShards:
    """The flat parts that were declared, by the names of their parameters."""

    def __init__(self) -> None:
        self._parts: dict[str, FlatPart] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ranks: tuple[int, ...] = ()

    def declare(self, parts: Mapping[str, FlatPart], shapes: Mapping[str, torch.Size], ranks: Collection[int]) -> None:
        """Take ``parts`` in the place of all that were declared before; ``shapes`` are the model's.

        Raises:
            TraceError: there is no such parameter, or a part exceeds its parameter or the tensor in which it lies.
        """
        for name, part in parts.items():
            if name not in shapes:
                raise TraceError(f"flat_parts names {name!r}, which is no parameter of job.model()")
            if not 0 <= part.begin <= part.begin + part.length <= shapes[name].numel():
                raise TraceError(f"flat_parts has {_run(part.begin, part)} of {name}, of {shapes[name].numel()}")
            if part.tensor.dim() != 1 or not 0 <= part.offset <= part.offset + part.length <= len(part.tensor):
                size = list(part.tensor.shape)
                raise TraceError(f"flat_parts has {name} in {_run(part.offset, part)} of a tensor of {size}")
        self._parts = dict(parts)
        self._shapes = {name: tuple(shapes[name]) for name in parts}
        self._ranks = tuple(sorted(ranks))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __bool__(self) -> bool:
        return bool(self._parts)

    def weight(self, name: str) -> FlatShard:
        return self._shard(name, self._parts[name].tensor)

    def names_in(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of the parameters whose parts lie in these tensors."""
        held = {id(tensor) for tensor in tensors}
        return [name for name, part in self._parts.items() if id(part.tensor) in held]

    def gradients_in(self, tensors: Iterable[Tensor], scale: float) -> Iterator[tuple[str, FlatShard]]:
        """Yield this rank's parts of gradients, divided by ``scale``, of the parameters whose parts lie in these."""
        gradients = {id(one): one.grad if scale == 1.0 else one.grad / scale for one in tensors if one.grad is not None}
        for name, part in self._parts.items():
            if id(part.tensor) in gradients:
                yield name, self._shard(name, gradients[id(part.tensor)])

    def _shard(self, name: str, flat: Tensor) -> FlatShard:
        part = self._parts[name]
        values = flat.detach().reshape(-1)[part.offset : part.offset + part.length]
        return FlatShard(values, part.begin, self._shapes[name], self._ranks)


def _run(begin: int, part: FlatPart) -> str:
    return f"entries {begin} to {begin + part.length}"
