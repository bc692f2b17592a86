"""Devices or ranks arranged along named dimensions, and the parts that they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple


@dataclass(frozen=True)
class HeldPart:
    """Part ``index``, counted from 0, of ``count`` equal parts. The whole is part 0 of 1."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Mesh:
    """The size of each dimension by its name, outermost first, as in ``torch.distributed.device_mesh``.

    Without dimensions, it has one member.

    Raises:
        ValueError: two dimensions have the same name, or one has no member.
    """

    dimensions: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(dict(self.dimensions)) < len(self.dimensions) or any(size < 1 for _, size in self.dimensions):
            raise ValueError(f"the dimensions of a mesh need different names and at least one member each: {self}")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """Return a mesh of these dimensions, for example ``Mesh.of(replicate=2, shard=4)``."""
        return cls(tuple(sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dimensions)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, member: int) -> dict[str, int]:
        """Return a member's coordinate along each dimension."""
        if not 0 <= member < self.size:
            raise ValueError(f"{self} has members 0 to {self.size - 1}, not {member}")
        found = {}
        for name, size in reversed(self.dimensions):
            member, found[name] = divmod(member, size)
        return {name: found[name] for name in self.names}

    def member(self, **coordinates: int) -> int:
        """Return the member at these coordinates. The default coordinate is 0."""
        number = 0
        for name, size in self.dimensions:
            number = number * size + coordinates.get(name, 0)
        return number

    def groups(self, *along: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of members that differ only in their coordinates along these dimensions.

        Each member is in one group. Without dimensions, each group has one member.
        """
        return tuple(
            tuple(self.member(**fixed, **free) for free in self._points(tuple(n for n in self.names if n in along)))
            for fixed in self._points(tuple(n for n in self.names if n not in along))
        )

    def part(self, member: int, *along: str) -> HeldPart:
        """Return which part a member holds of what is split along these dimensions."""
        at = self.coordinates(member)
        cut = Mesh(tuple((name, size) for name, size in self.dimensions if name in along))
        return HeldPart(cut.member(**{name: at[name] for name in cut.names}), cut.size)

    def _points(self, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
        sizes = dict(self.dimensions)
        for point in product(*(range(sizes[name]) for name in names)):
            yield dict(zip(names, point, strict=True))

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.dimensions) or "one member"


class Part(NamedTuple):
    """A block of a parameter: ``tensor``, whose ``grad`` has the block's gradient.

    ``begin`` is the index of the block's first entry in the parameter, which has as many dimensions. A ``tensor``
    without entries says that this rank has no part of the parameter.
    """

    tensor: Any
    begin: tuple[int, ...]


class FlatPart(NamedTuple):
    """Entries ``begin`` to ``begin + length`` of a flattened parameter.

    They are ``tensor[offset : offset + length]`` of a one-dimensional ``tensor``, whose ``grad`` has their gradient. If
    ``length`` is 0, this rank has no part of the parameter.
    """

    tensor: Any
    offset: int
    length: int
    begin: int
