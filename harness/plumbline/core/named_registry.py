"""Values by name: a registry in the order of registration, and what users are told who choose an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from plumbline.core.errors import PlanError


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


def unknown_name(kind: str, name: str, known: Iterable[str]) -> PlanError:
    """Return an error that shows similar names or, if there are none, all that are known."""
    known = list(known)
    close = " or ".join(map(repr, difflib.get_close_matches(name, known, 4)))
    hint = f"did you mean {close}?" if close else f"choose from {', '.join(known)}"
    return PlanError(f"unknown {kind} {name!r}: {hint}")


def check_choice(kind: str, name: str, own_options: Mapping[str, Collection[str]], options: Any) -> None:
    """Raise ``PlanError`` if ``--kind name`` is unknown, or if one of ``options`` is for another choice alone."""
    if name not in own_options:
        raise unknown_name(kind, name, own_options)
    for other, own in own_options.items():
        for option in sorted(set(own).difference(own_options[name])):
            if getattr(options, option):
                raise PlanError(f"--{option.replace('_', '-')} is for --{kind} {other}, not for {name}")
