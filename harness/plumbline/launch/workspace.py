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
        return cls(Scratch.new(RUN, place))

    @classmethod
    def of(cls, path: Path) -> Workspace:
        return cls(Scratch(path))

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="cell-", dir=self.path))

    def leave(self, *, remove: bool) -> None:
        self._scratch.leave(remove=remove)
