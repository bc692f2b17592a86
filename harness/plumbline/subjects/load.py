"""From what the user typed after ``--subject`` to the subjects it names."""

from __future__ import annotations

from pathlib import Path

from plumbline.core.errors import SubjectError
from plumbline.subjects.declare import Subject
from plumbline.subjects.short_names import SHORT_NAMES
from plumbline.user_code.user_module import import_file, import_module


def load(locator: str) -> list[Subject]:
    """Return the subjects behind ``path/to/file.py``, ``path/to/file.py::name``, a module or a short name.

    A name may be there several times, declared each time for backends of its own.

    Raises:
        SubjectError: nothing is there, it cannot be imported, or it declares no subject.
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
    # What a file imports to build upon is not what it puts up; a file of nothing but imports is a collection.
    own = [value for value in every if value.__module__ == module.__name__] or every
    found = list({id(value): value.__plumbline_subject__ for value in own}.values())
    if not found:
        raise SubjectError(f"{place} declares no subject: put @subject(...) from plumbline over its train(job)")
    chosen = [declared for declared in found if wanted in ("", declared.name)]
    if not chosen:
        names = dict.fromkeys(declared.name for declared in found)
        raise SubjectError(f"{place} has no subject {wanted!r}; it has {', '.join(names)}")
    return chosen
