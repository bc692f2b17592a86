"""Finds the pieces that a change can affect: those that opened a changed file, as the kernel reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

PACKAGE = "__init__.py"


@dataclass(frozen=True)
class Changes:
    """The files that differ between two commits, relative to the checkout; ``new`` lists added files."""

    files: Sequence[str]
    new: Sequence[str] = ()

    def reach(self, read: Iterable[str]) -> bool:
        """Whether the outcome of a piece that opened the files ``read`` may have changed.

        All modules of a package count, because a process may import others next time. A new file counts if a file in
        the same folder was opened, because it can be found there. ``reports/`` does not count.
        """
        opened = set(read)
        packages = _packages(opened)
        folders = {_folder(file) for file in opened}
        return any(
            file in opened or _folder(file) in packages or (file in self.new and _folder(file) in folders)
            for file in self.files
            if not file.startswith("reports/")
        )


def changes_until(root: Path, commit: str) -> Callable[[str], Changes | None]:
    """Return a function from an earlier commit to the changes up to ``commit``, or to None if git does not know."""

    @cache
    def since(earlier: str) -> Changes | None:
        names = []
        for options in ((), ("--diff-filter=A",)):
            command = ("git", "diff", "--name-only", "--no-renames", "-z", *options, earlier, commit, "--")
            told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            if told.returncode != 0:
                return None
            names.append([name for name in told.stdout.split("\0") if name])
        return Changes(*names)

    return since


class OpenedFiles:
    """Records which files of a checkout any process opens from now on. Needs Linux and ``inotify_simple``.

    A module counts as opened if its bytecode is. The kernel reports each file only once, so the cost does not depend on
    the number of processes.
    """

    def __init__(self, root: Path) -> None:
        self._files: dict[int, str] | None = None
        tracked = subprocess.run(("git", "ls-files", "-z"), cwd=root, capture_output=True, text=True, check=False)
        try:
            from inotify_simple import INotify, flags

            self._kernel = INotify()
            watched = flags.OPEN | flags.ONESHOT
            self._files = {
                self._kernel.add_watch(path, watched): file
                for file in tracked.stdout.split("\0")
                if (root / file).is_file()
                for path in (root / file, *_bytecode(root / file))
            }
        except (ImportError, OSError):  # another system, or too many watches
            return

    def so_far(self) -> list[str] | None:
        """Return the opened files, or None if they are unknown; stop watching.

        For a package, only ``__init__.py`` is listed, because all its modules count anyway.
        """
        if not self._files:
            return None
        from inotify_simple import flags

        with self._kernel:
            events = self._kernel.read(timeout=0)
        if any(event.mask & flags.Q_OVERFLOW for event in events):
            return None
        opened = {self._files[event.wd] for event in events if event.mask & flags.OPEN}
        packages = _packages(opened)
        return sorted(file for file in opened if _folder(file) not in packages or PurePosixPath(file).name == PACKAGE)


def _bytecode(file: Path) -> Iterable[Path]:
    if file.suffix != ".py":
        return ()
    return (file.parent / "__pycache__").glob(f"{file.stem}.{sys.implementation.cache_tag}*.pyc")


def _packages(files: Iterable[str]) -> set[str]:
    return {_folder(file) for file in files if PurePosixPath(file).name == PACKAGE}


def _folder(file: str) -> str:
    return str(PurePosixPath(file).parent)
