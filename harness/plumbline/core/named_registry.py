"""The registry of backends and of precisions: values by name, in the order in which they were registered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Named(Protocol):
    """A value that knows its name."""

    @property
    def name(self) -> str:
        """What the command line, records and reports call it."""


N = TypeVar("N", bound=Named)


class NamedRegistry(dict[str, N]):
    """Values by their own names. ``kind`` is what one of them is called in errors, for example ``backend``."""

    def __init__(self, kind: str, values: Iterable[N] = ()) -> None:
        super().__init__()
        self.kind = kind
        for value in values:
            self.register(value)

    def register(self, value: N) -> N:
        """Add ``value`` under its own name, and return it.

        Raises:
            ValueError: the name is taken by something else.
        """
        if self.setdefault(value.name, value) != value:
            raise ValueError(f"there is already a {self.kind} {value.name!r}: give this one another name")
        return value
