"""Imports a user's code, a file by its path or a module by its name, and hashes its source.

Its tracebacks do not have the frames of the import machinery and of the harness.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from types import ModuleType

from plumbline.core.errors import SubjectError

LONGEST = 8000
"""Maximum number of characters. Longer tracebacks lose their middle."""

_LONGEST_LINE = 300

_FEWEST_OF_A_LIBRARY = 2
"""Number of frames, the innermost ones, that are kept of consecutive library frames."""

_MACHINERY = tuple(
    os.path.join("plumbline", *parts)
    for parts in (
        ("__init__.py",),
        ("subjects", "load.py"),
        ("user_code.py",),
        ("own_workloads", "load.py"),
        ("subjects", "declare.py"),
        ("subjects", "released.py"),
        ("worker", "server.py"),
    )
)


def headline(error: BaseException) -> str:
    # TracebackException, because str(error) may raise.
    said = str(traceback.TracebackException(type(error), error, None)).strip().partition("\n")[0]
    if len(said) > _LONGEST_LINE:
        said = f"{said[:_LONGEST_LINE]} …"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def user_traceback(error: BaseException) -> str:
    """Return Python's traceback of ``error`` and of the exceptions of its chain.

    It has no frames of the import machinery and the harness, and only the innermost frames in libraries.
    """
    told = traceback.TracebackException.from_exception(error)
    _cut(told, set())
    text = "".join(told.format()).rstrip("\n")
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}\n  …\n{text[-LONGEST // 2 :]}"
    return text


def _cut(told: traceback.TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    frames = [frame for frame in told.stack or () if not _is_machinery(frame.filename)]
    if frames:
        told.stack[:] = _with_few_of_libraries(frames)
    else:
        told.stack = None  # type: ignore[assignment]  # without frames, no head of a traceback
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _cut(other, seen)


def _with_few_of_libraries(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    kept: list[traceback.FrameSummary] = []
    for is_library, group in groupby(frames, lambda frame: _is_library(frame.filename)):
        consecutive = list(group)
        kept += consecutive[-_FEWEST_OF_A_LIBRARY:] if is_library else consecutive
    return kept


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen importlib") or file.endswith(
        (os.path.join("importlib", "__init__.py"), *_MACHINERY)
    )


def _is_library(file: str) -> bool:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return any(file.startswith(f"{folder}{os.sep}") for folder in folders) or "-packages" in file


_IMPORTED: dict[Path, tuple[bytes, ModuleType]] = {}
"""The source and the module of each imported file."""


def import_file(path: Path, kind: str = "subject") -> ModuleType:
    """Import the file at ``path``; ``kind`` is what it contains."""
    if not path.is_file():
        raise SubjectError(f"file {path} not found")
    # A file may have the name of a library, which it must not replace.
    there = importlib.util.find_spec(path.stem.split(".")[0])
    # Under its own name, spawned processes can unpickle what it defines: its folder is in their path.
    name = path.stem if there is None or _is(path, there.origin) else f"{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # As for a script, the file can import what is in its folder.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _broken(error) from error
    _IMPORTED[path.resolve()] = path.read_bytes(), module
    return module


def imported_file(path: Path) -> ModuleType | None:
    """Return the module that this process imported from ``path``; None if there is none or the file has changed."""
    if path in _IMPORTED:
        source, module = _IMPORTED[path]
        return module if path.is_file() and path.read_bytes() == source else None
    other = sys.modules.get(path.stem)  # imported by a statement or by unpickling
    return other if _is(path, getattr(other, "__file__", None)) else None


def _is(path: Path, file: str | None) -> bool:
    return file is not None and Path(file).resolve() == path.resolve()


def import_module(name: str, shipped: Collection[str] = (), short_names: Collection[str] = ()) -> ModuleType:
    """Import a module by its name. It can be in the current folder.

    The errors of ``shipped`` modules need no traceback. ``short_names`` are alternatives for the error message.
    """
    if "/" in name or name.startswith("."):
        raise SubjectError(f"file {name} not found: give a path that ends in .py, or the name of a module")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())  # missing in programs that are scripts, such as pytest
    try:
        return importlib.import_module(name)
    except SubjectError as error:
        if name in shipped:
            raise  # the message says how to install the missing library
        raise _broken(error) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            others = f"a module or one of {', '.join(short_names)}" if short_names else "or a module"
            raise SubjectError(f"cannot be imported ({error}): give a file.py, {others}") from error
        raise _broken(error) from error


def _broken(error: BaseException) -> SubjectError:
    said = str(error) if isinstance(error, SubjectError) else headline(error)
    return SubjectError(f"cannot be imported: {said}\n{user_traceback(error)}")


def sha256_of(module: ModuleType) -> str:
    """Return the SHA-256 of a module's source and of the modules in its folder that it imports names from.

    Installed packages, and what a function imports when it runs, are not included.
    """
    first = Path(str(module.__file__)).resolve()
    home = first.parents[module.__name__.count(".")]
    digest = hashlib.sha256()
    for file in sorted(_sources(module, home, {first})):
        digest.update(file.relative_to(home).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(module: ModuleType, home: Path, found: set[Path]) -> set[Path]:
    for value in list(vars(module).values()):
        name = str(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", ""))
        other = sys.modules.get(name)
        file = getattr(other, "__file__", None)
        if other is None or not file or name.partition(".")[0] == "plumbline" or "-packages" in file:
            continue
        path = Path(file).resolve()
        if path.suffix == ".py" and path.is_relative_to(home) and path not in found:
            found.add(path)
            _sources(other, home, found)
    return found
