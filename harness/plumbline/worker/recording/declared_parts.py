"""Parts of parameters, as a subject declares them: where this rank's weights and gradients lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.trace import Shard


class DeclaredParts:
    """The parts that were declared, by the names of their parameters."""

    def __init__(self) -> None:
        self._parts: dict[str, FlatPart | Part] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ranks: tuple[int, ...] = ()

    def declare(
        self, parts: Mapping[str, FlatPart | Part], shapes: Mapping[str, torch.Size], ranks: Collection[int]
    ) -> None:
        """Take ``parts`` in the place of all that were declared before; ``shapes`` are the model's.

        Raises:
            TraceError: there is no such parameter, or a part exceeds its parameter or the tensor in which it lies.
        """
        for name, part in parts.items():
            if name not in shapes:
                raise TraceError(f"job.parts names {name!r}: job.model() has no such parameter")
            if flaw := _flaw(name, part, shapes[name]):
                raise TraceError(f"job.parts: {flaw}")
        self._parts = dict(parts)
        self._shapes = {name: tuple(shapes[name]) for name in parts}
        self._ranks = tuple(sorted(ranks))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    @property
    def are_flat(self) -> bool:
        return any(isinstance(part, FlatPart) for part in self._parts.values())

    def weight(self, name: str) -> Shard:
        return self._shard(name, self._parts[name].tensor)

    def names_in(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of the parameters whose parts lie in these tensors."""
        held = {id(tensor) for tensor in tensors}
        return [name for name, part in self._parts.items() if id(part.tensor) in held]

    def hold(self, tensor: Tensor) -> bool:
        """Return whether parts lie in this tensor."""
        return any(part.tensor is tensor for part in self._parts.values())

    def gradients_in(self, tensors: Iterable[Tensor], scale: float) -> Iterator[tuple[str, Shard]]:
        """Yield this rank's parts of gradients, divided by ``scale``, of the parameters whose parts lie in these."""
        gradients = {id(one): one.grad if scale == 1.0 else one.grad / scale for one in tensors if one.grad is not None}
        for name, part in self._parts.items():
            if id(part.tensor) in gradients:
                yield name, self._shard(name, gradients[id(part.tensor)])

    def _shard(self, name: str, tensor: Tensor) -> Shard:
        part, values = self._parts[name], tensor.detach()
        if isinstance(part, FlatPart):
            run = values.reshape(-1)[part.offset : part.offset + part.length]
            return Shard(run, (part.begin,), self._shapes[name], self._ranks)
        return Shard(values, part.begin, self._shapes[name], self._ranks)


def _flaw(name: str, part: FlatPart | Part, shape: torch.Size) -> str | None:
    """Return why a part cannot be one of the parameter ``name`` of ``shape``; else None."""
    size = list(part.tensor.shape)
    if isinstance(part, Part):
        inside = len(part.begin) == len(size) == len(shape) and all(
            0 <= begin <= begin + length <= whole for begin, length, whole in zip(part.begin, size, shape, strict=True)
        )
        return None if inside else f"a block of {size} at {list(part.begin)} exceeds {name}, which is {list(shape)}"
    if not 0 <= part.begin <= part.begin + part.length <= shape.numel():
        return f"{_run(part.begin, part)} exceed {name}, which has {shape.numel()}"
    if len(size) != 1 or not 0 <= part.offset <= part.offset + part.length <= size[0]:
        return f"{name} cannot be {_run(part.offset, part)} of a tensor of {size}"
    return None


def _run(begin: int, part: FlatPart) -> str:
    return f"entries {begin} to {begin + part.length}"
