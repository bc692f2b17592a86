"""Registries of values by name, in the order of their registration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Named(Protocol):
    """A value with a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


class NamedRegistry(dict[str, N]):
    """Values by their names. ``kind`` is what errors call a value, for example ``backend``."""

    def __init__(self, kind: str, values: Iterable[N] = ()) -> None:
        super().__init__()
        self.kind = kind
        for value in values:
            self.register(value)

    def register(self, value: N) -> N:
        """Add ``value`` under its name and return it."""
        if self.setdefault(value.name, value) != value:
            raise ValueError(f"{self.kind} {value.name!r} already exists; choose another name")
        return value
