"""The folder of a run's evidence, removed when the run ends or, if it was killed, by the next run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plumbline.worker.scratch import RUN, Scratch


class Workspace:
    """A run's folder, in use by this process until it is left."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.path = Path(scratch.path)

    @classmethod
    def new(cls, place: Path | None = None) -> Workspace:
        """Make one, in the temporary directory or in ``place``."""
        return cls(Scratch.new(RUN, place))

    @classmethod
    def of(cls, path: Path) -> Workspace:
        """Use one that another process made."""
        return cls(Scratch(path))

    def folder(self) -> Path:
        """Return a new, empty folder in it."""
        return Path(tempfile.mkdtemp(prefix="cell-", dir=self.path))

    def leave(self, *, remove: bool) -> None:
        """Use it no longer, and remove it, or leave that to others who use it."""
        self._scratch.leave(remove=remove)
