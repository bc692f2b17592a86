"""Parses ``--subject``, loads the subjects behind it, and lists those that ship."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from plumbline.core.errors import PlanError, SubjectError
from plumbline.subjects.declare import Subject
from plumbline.subjects.short_names import SHORT_NAMES
from plumbline.user_code.user_module import import_file, import_module


def parse_subject(text: str) -> tuple[str, str | None]:
    """Split ``locator;python=/path/to/python`` into the locator and the interpreter, None for this one."""
    locator, _, settings = text.partition(";")
    python = None
    for setting in filter(None, settings.split(";")):
        name, _, value = setting.partition("=")
        if name.strip() != "python" or not value:
            raise PlanError(f"--subject {text!r}: only python=/path/to/python may follow the semicolon")
        python = value.strip()
        if shutil.which(python) is None:
            raise PlanError(f"--subject {text!r}: interpreter {python} not found")
    if not locator:
        raise PlanError(f"--subject {text!r} names no subject")
    return locator, python


def load(locator: str) -> list[Subject]:
    """Return the subjects behind ``path/to/file.py``, ``path/to/file.py::name``, a module or a short name.

    Several subjects may have the same name, each for its own backends.
    """
    place, _, wanted = locator.partition("::")
    if place.endswith(".py"):
        module = import_file(Path(place))
    else:
        shipped = {adapter.module for adapter in SHORT_NAMES.values()}
        module = import_module(SHORT_NAMES[place].module if place in SHORT_NAMES else place, shipped, SHORT_NAMES)
    every = [
        value for value in vars(module).values() if isinstance(getattr(value, "__plumbline_subject__", None), Subject)
    ]
    # Imported trainers do not count, unless the file contains nothing but imports.
    own = [value for value in every if value.__module__ == module.__name__] or every
    found = list({id(value): value.__plumbline_subject__ for value in own}.values())
    if not found:
        raise SubjectError(f"{place} declares no subject: decorate its train(job) with plumbline's @subject(...)")
    if place in SHORT_NAMES and any(declared.name == place for declared in found):
        wanted = wanted or place  # its module may declare other subjects too
    chosen = [declared for declared in found if wanted in ("", declared.name)]
    if not chosen:
        names = dict.fromkeys(declared.name for declared in found)
        raise SubjectError(f"{place} has no subject {wanted!r}; it has {', '.join(names)}")
    return chosen


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
    for name, adapter in SHORT_NAMES.items():
        distribution = (adapter.library or "torch-plumbline").partition("[")[0]
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
