"""Tracebacks of a user's code, without the frames of the import machinery and of the harness."""

from __future__ import annotations

import os
import sysconfig
import traceback
from itertools import groupby

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
        ("user_code", "user_module.py"),
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
