"""A temporary folder to which all ranks of a process group write. The last rank to leave removes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed

from plumbline.recording.process import rank_and_world

_LEFT = "left-"


class UnreachableFolderError(Exception):
    """A rank cannot see the folder of the other ranks. The message says what to do."""


class SharedFolder:
    """A folder that all ranks of a process group share. Every rank needs to create equally many, in the same order.

    ``prepare`` is called with a new folder before it is shared. Without a process group, each process has its own
    folder. ``above`` is the parent folder, None for the system's temporary folder.
    """

    def __init__(self, prepare: Callable[[Path], None], above: str | None = None) -> None:
        self._pid = os.getpid()
        self._prepare = prepare
        self._above = above
        self.path: str | None = None
        self._place = 0, 1

    def find(self) -> str:
        """Return the folder that the first rank to ask has created.

        Raises:
            OSError: it cannot be created.
            UnreachableFolderError: it is on another machine.
        """
        own = tempfile.mkdtemp(prefix="plumbline-attach-", dir=self._above)
        try:
            self._prepare(Path(own))
            place = rank_and_world()
            self._place = place or self._place
            self.path = own if place is None else self._agreed(own, place[0])
        finally:
            if self.path != own:
                shutil.rmtree(own, ignore_errors=True)
        return self.path

    def leave(self) -> None:
        """Note that this rank no longer needs the folder. The last rank to do so removes it."""
        if self.path is not None and os.getpid() == self._pid:  # and not in a fork of the process
            rank, ranks = self._place
            with suppress(OSError):
                Path(self.path, f"{_LEFT}{rank}").touch()
                if sum(one.name.startswith(_LEFT) for one in os.scandir(self.path)) >= ranks:
                    shutil.rmtree(self.path, ignore_errors=True)
            self.path = None

    def _agreed(self, own: str, rank: int) -> str:
        c10d: Any = torch.distributed.distributed_c10d
        store = c10d.PrefixStore("plumbline attach", c10d._get_default_store())
        number = store.add(f"folders of rank {rank}", 1)
        found: str = store.compare_set(f"folder {number}", "", own).decode()
        if found != own and not os.path.isdir(found):
            raise UnreachableFolderError(
                f"the folder {found} of another rank does not exist on this machine: pass attach() a folder= that all "
                "machines share"
            )
        return found
