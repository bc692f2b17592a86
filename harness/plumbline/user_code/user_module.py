"""Importing a user's code: a file by its path, or a module by its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from plumbline.core.errors import SubjectError
from plumbline.user_code.user_traceback import headline, user_traceback

_IMPORTED: dict[Path, tuple[bytes, ModuleType]] = {}
"""Files that were imported, as ``sys.modules`` has modules: the source, and what was made of it."""


def import_file(path: Path, kind: str = "subject") -> ModuleType:
    """Import the file at ``path`` as a module of its own; ``kind`` is what it holds.

    Raises:
        SubjectError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise SubjectError(f"there is no file {path}")
    # A file may be called like a library; it must not take that library's place.
    there = importlib.util.find_spec(path.stem.split(".")[0])
    # By its own name it can be unpickled in processes that a trainer spawns: this file's folder is in their path.
    name = path.stem if there is None or _is(path, there.origin) else f"{kind}_{path.stem}"
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
    _IMPORTED[path.resolve()] = path.read_bytes(), module
    return module


def imported_file(path: Path) -> ModuleType | None:
    """Return what this process has imported from the file at ``path``, None where that is nothing or has changed."""
    if path in _IMPORTED:
        source, module = _IMPORTED[path]
        return module if path.is_file() and path.read_bytes() == source else None
    other = sys.modules.get(path.stem)  # by an import statement, or by what was unpickled here
    return other if _is(path, getattr(other, "__file__", None)) else None


def _is(path: Path, file: str | None) -> bool:
    return file is not None and Path(file).resolve() == path.resolve()


def import_module(name: str, shipped: Collection[str] = (), short_names: Collection[str] = ()) -> ModuleType:
    """Import a module by its name, also one that lies in the present folder.

    ``shipped`` are modules whose own errors are sentences already, ``short_names`` what else could have been meant.

    Raises:
        SubjectError: there is none, or it raises.
    """
    if "/" in name or name.startswith("."):
        raise SubjectError(f"there is no file {name}: a file's name ends in .py, a module's has no slash")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())  # a program that is a script, as pytest is, does not look there
    try:
        return importlib.import_module(name)
    except SubjectError as error:
        if name in shipped:
            raise  # the library of a trainer that ships is missing: the message says how to install it
        raise _broken(error) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            others = f"a module, or one of {', '.join(short_names)}" if short_names else "or a module"
            raise SubjectError(f"cannot be imported ({error}); give a file.py, {others}") from error
        raise _broken(error) from error


def _broken(error: BaseException) -> SubjectError:
    said = str(error) if isinstance(error, SubjectError) else headline(error)
    return SubjectError(f"cannot be imported: {said}\n{user_traceback(error)}")
