"""The last lines of the ranks' logs, which lie beside the trace of a cell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 30
LONGEST_LINE = 500
MOST_LOGS = 4
_MOST_BYTES = 1 << 16


def trace_folder(run_path: Path, cell: str) -> Path | None:
    """Return the folder of a cell's trace, None if the run has none.

    A run may come from anywhere: a name that leads out of the run's folder has no trace.
    """
    if cell in ("", ".", "..") or "/" in cell or "\0" in cell:
        return None
    folder = run_path / "traces" / cell
    try:
        links = folder.is_symlink() or folder.parent.is_symlink()
        return folder if folder.is_dir() and not links else None
    except OSError:  # a name that is too long for any file
        return None


def log_tails(run_path: Path, cell: str) -> list[tuple[str, str]]:
    """Return the ends of the logs of a cell, each with the names of the ranks that wrote it; empty logs are left out.

    At most ``MOST_LOGS`` of at most ``MOST_LINES`` lines with at most ``LONGEST_LINE`` characters each.
    """
    folder = trace_folder(run_path, cell)
    ranks: dict[str, list[str]] = {}
    for rank, tail in _tails(folder) if folder else ():
        ranks.setdefault(tail, []).append(rank)
    return [(", ".join(names), tail) for tail, names in ranks.items()][:MOST_LOGS]


def _tails(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the ends of the logs of the launch, then of the interrupted and resumed ones, in folders of their own."""
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
