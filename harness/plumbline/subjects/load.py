"""Loads the subjects behind ``--subject``."""

from __future__ import annotations

from pathlib import Path

from plumbline.core.errors import SubjectError
from plumbline.subjects.declare import Subject
from plumbline.subjects.short_names import SHORT_NAMES
from plumbline.user_code.user_module import import_file, import_module


def load(locator: str) -> list[Subject]:
    """Return the subjects behind ``path/to/file.py``, ``path/to/file.py::name``, a module or a short name.

    Several subjects may have the same name, each for its own backends.

    Raises:
        SubjectError: nothing is found, it cannot be imported, or it declares no subject.
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
