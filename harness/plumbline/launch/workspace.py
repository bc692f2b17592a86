"""The folder of a run's evidence. The run removes it at its end or, if it was killed, the next run does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plumbline.worker.scratch import RUN, Scratch


class Workspace:
    """A run's folder, which this process uses until ``leave``."""

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
