"""The subjects that ship, and whether their libraries are installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from plumbline.core.errors import SubjectError
from plumbline.subjects.declare import Subject
from plumbline.subjects.load import load
from plumbline.subjects.short_names import SHORT_NAMES
from plumbline.subjects.virtual_environments import LIBRARIES


@dataclass(frozen=True)
class Shipped:
    """A subject that ships.

    ``library`` is its library with the installed version, None if it is not installed. ``declared`` has a declaration
    for each group of backends. ``obstacle`` says why the subject cannot be imported.
    """

    name: str
    library: str | None
    declared: tuple[Subject, ...] = ()
    obstacle: str | None = None


def shipped() -> list[Shipped]:
    every = []
    for name in SHORT_NAMES:
        distribution = LIBRARIES.get(name, "torch-plumbline").partition("[")[0]
        try:
            library = f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            every.append(Shipped(name, None))
            continue
        try:
            every.append(Shipped(name, library, tuple(load(name))))
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, SubjectError) else f"{type(error).__name__}: {error}"
            every.append(Shipped(name, library, obstacle=reason.removeprefix("cannot be imported: ")))
    return every
