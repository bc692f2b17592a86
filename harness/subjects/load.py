"""From what the user typed after ``--subject`` to the subjects it names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from harness.core.errors import SubjectError
from harness.subjects.declare import Subject
from harness.subjects.short_names import SHORT_NAMES
from harness.subjects.user_traceback import headline, user_traceback


def load(locator: str) -> list[Subject]:
    """Return the subjects behind ``path/to/file.py``, ``path/to/file.py::name``, a module or a short name.

    A name may be there several times, declared each time for backends of its own.

    Raises:
        SubjectError: nothing is there, it cannot be imported, or it declares no subject.
    """
    place, _, wanted = locator.partition("::")
    if place.endswith(".py"):
        module = _import_file(Path(place))
    else:
        module = _import_module(SHORT_NAMES[place].module if place in SHORT_NAMES else place)
    every = [
        value for value in vars(module).values() if isinstance(getattr(value, "__plumbline_subject__", None), Subject)
    ]
    # What a file imports to build upon is not what it puts up; a file of nothing but imports is a collection.
    own = [value for value in every if value.__module__ == module.__name__] or every
    found = list({id(value): value.__plumbline_subject__ for value in own}.values())
    if not found:
        raise SubjectError(f"{place} declares no subject: put @subject(...) from harness over its train(job)")
    chosen = [declared for declared in found if wanted in ("", declared.name)]
    if not chosen:
        names = dict.fromkeys(declared.name for declared in found)
        raise SubjectError(f"{place} has no subject {wanted!r}; it has {', '.join(names)}")
    return chosen


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SubjectError(f"there is no file {path}")
    # A file may be called like a library; it must not take that library's place.
    name = path.stem if importlib.util.find_spec(path.stem.split(".")[0]) is None else f"subject_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # What lies beside the file can be imported by it, as when it is run as a script.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _broken(error) from error
    return module


def _import_module(name: str) -> ModuleType:
    if "/" in name or name.startswith("."):
        raise SubjectError(f"there is no file {name}: a file's name ends in .py, a module's has no slash")
    try:
        return importlib.import_module(name)
    except SubjectError as error:
        if name in {adapter.module for adapter in SHORT_NAMES.values()}:
            raise  # the library of a trainer that ships is missing: the message says how to install it
        raise _broken(error) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            known = ", ".join(SHORT_NAMES)
            told = f"cannot be imported ({error}); give a file.py, a module, or one of {known}"
            raise SubjectError(told) from error
        raise _broken(error) from error


def _broken(error: BaseException) -> SubjectError:
    """Return what to tell of an error in the user's code: in a line, then with where it was raised."""
    said = str(error) if isinstance(error, SubjectError) else headline(error)
    return SubjectError(f"cannot be imported: {said}\n{user_traceback(error)}")
