"""A run's files: errors in reading and writing them, atomic replacement, and the last lines of the ranks' logs."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from plumbline.core.errors import PlumblineError

# ruff: noqa: N818 - these are named after what is wrong, and all of them are ResultsErrors.


class ResultsError(PlumblineError):
    """The run's files cannot be written or read."""


class ReportDirUnusable(ResultsError):
    """The report directory is missing, not a directory, or not writable."""


class RunNotFound(ResultsError):
    """There is no run at this path."""


class NothingToResume(ResultsError):
    """The run is complete, another process is writing it, or it is not the run that was asked for."""


class MissingHeader(ResultsError):
    """The file does not begin with a whole header: it is empty, truncated, or not a results file."""


class CorruptRecord(ResultsError):
    """A line inside the file is not a record; the message names file and line (counted from 1)."""


class NewerSchema(ResultsError):
    """The file was written by a newer plumbline than this one."""


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, replacing an existing file or link, or raise ``ResultsError``."""
    beside = _name_beside(path)
    try:
        beside.write_bytes(text.encode())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        what = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make its folder writable"
        raise ResultsError(f"Cannot write {path} ({error.strerror}): {what}.") from error


def point_symlink(link: Path, target: str) -> None:
    """Make ``link`` a symlink to ``target``, replacing an existing link; raise ``OSError`` if that is not possible."""
    beside = _name_beside(link)
    try:
        beside.symlink_to(target, target_is_directory=True)
        os.replace(beside, link)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _name_beside(path: Path) -> Path:
    # In the same folder: a rename is atomic only within one file system.
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


MOST_LINES = 30
LONGEST_LINE = 500
MOST_LOGS = 4
_MOST_BYTES = 1 << 16


def trace_folder(run_path: Path, cell: str) -> Path | None:
    """Return the folder of a cell's trace, None if there is none, or if its name leads out of the run's folder."""
    if cell in ("", ".", "..") or "/" in cell or "\0" in cell:
        return None
    folder = run_path / "traces" / cell
    try:
        links = folder.is_symlink() or folder.parent.is_symlink()
        return folder if folder.is_dir() and not links else None
    except OSError:  # a name that is too long for any file
        return None


def log_tails(run_path: Path, cell: str) -> list[tuple[str, str]]:
    """Return the last lines of a cell's non-empty logs, each with the ranks that wrote them."""
    folder = trace_folder(run_path, cell)
    ranks: dict[str, list[str]] = {}
    for rank, tail in _tails(folder) if folder else ():
        ranks.setdefault(tail, []).append(rank)
    return [(", ".join(names), tail) for tail, names in ranks.items()][:MOST_LOGS]


def _tails(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the ends of the logs of the launch, then of the interrupted and resumed launches in their own folders."""
    for launch in (folder, *sorted(inner for inner in folder.iterdir() if inner.is_dir() and not inner.is_symlink())):
        logs = {int(number): log for log in launch.glob("rank-*.log") if (number := log.stem[5:]).isdecimal()}
        for rank, log in sorted(logs.items()):
            if tail := _tail(log):
                yield f"rank {rank}" if launch == folder else f"{launch.name}, rank {rank}", tail


def _tail(log: Path) -> str:
    if log.is_symlink() or not log.is_file():
        return ""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _MOST_BYTES))
            lines = stream.read(_MOST_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(line[:LONGEST_LINE] for line in lines[-MOST_LINES:])
