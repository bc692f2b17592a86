"""What all ranks share apart from the script's collectives: values in torch.distributed's store, and a folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from plumbline.recording.process import rank_and_world

TIMEOUT_S = 60.0
"""Seconds that a rank waits for the others. They reach this point in the same optimizer step, or not at all."""


_RECORDING: list[int] = []
"""The number of the recording, which is the same on all ranks; empty until it is known."""


def begin_recording() -> None:
    """Keep the next exchanges of this process apart from those of earlier recordings in the same process group.

    Every rank has to begin equally many recordings after the group was created.
    """
    _RECORDING.clear()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _recording()


class NoAgreementError(Exception):
    """The ranks do not compute together at this step. The message, which is the same on all ranks, says why."""


class AbsentRankError(Exception):
    """A rank did not arrive, so nothing can be computed together any more."""


class Exchange:
    """Gives each rank the values of all ranks, as JSON. Every rank has to make the same calls in the same order.

    A rank that needs no values calls ``say`` in place of ``values``.

    ``ranks``: the ranks that exchange values, by default all. ``patience_s``: seconds that each one waits for the
    others, by default ``TIMEOUT_S``.
    """

    def __init__(
        self,
        name: str = "plumbline joint forward",
        ranks: Sequence[int] | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._name = name
        self._ranks = ranks
        self._patience_s = patience_s
        self._round = 0
        self._store: Any = None

    def values(self, own: Any) -> list[Any]:
        """Return what each rank gave, in the order of ranks.

        Raises:
            AbsentRankError: a rank did not arrive.
        """
        ranks = range(torch.distributed.get_world_size()) if self._ranks is None else self._ranks
        rank = self._give({"value": own})
        keys = [f"{self._round} {other}" for other in ranks]
        patience = TIMEOUT_S if self._patience_s is None else self._patience_s
        try:
            self._store.wait(keys, timedelta(seconds=patience))
        except Exception as error:
            raise AbsentRankError(f"not all ranks reached the same optimizer step within {patience:.0f} s") from error
        found = [json.loads(self._store.get(key)) for key in keys]
        left = [f"rank {other}: {one['left']}" for other, one in zip(ranks, found, strict=True) if "left" in one]
        if left:
            raise AbsentRankError(left[0])
        # All ranks have arrived, so all have read the values of the previous round.
        if self._round > 1:
            self._store.delete_key(f"{self._round - 1} {rank}")
        return [one["value"] for one in found]

    def say(self, own: Any) -> None:
        """Give this rank's value for the next round, without waiting for those of other ranks."""
        self._give({"value": own})

    def offer(self, own: Any) -> None:
        """Write a value once, for ``offered``."""
        self._opened().set(f"offer {torch.distributed.get_rank()}", json.dumps(own))

    def offered(self) -> list[Any]:
        """Return what each rank has offered, without waiting; nothing as long as some rank has not."""
        keys = [f"offer {rank}" for rank in range(torch.distributed.get_world_size())]
        store = self._opened()
        return [json.loads(store.get(key)) for key in keys] if store.check(keys) else []

    def leave(self, why: str) -> None:
        """Tell ranks that wait for this one, now or at a later step, that it will not arrive, and ``why``."""
        self._give({"left": why})

    def _give(self, own: dict[str, Any]) -> int:
        """Write this rank's message for the next round; return the rank."""
        rank = torch.distributed.get_rank()
        store = self._opened()
        self._round += 1
        store.set(f"{self._round} {rank}", json.dumps(own))
        return rank

    def _opened(self) -> Any:
        if self._store is None:
            self._store = _store(f"{self._name} {_recording()}")
        return self._store


def _recording() -> int:
    if not _RECORDING:
        number = _store("plumbline recordings").add(f"of rank {torch.distributed.get_rank()}", 1)
        _RECORDING.append(number)
    return _RECORDING[0]


def _store(name: str) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.PrefixStore(name, c10d._get_default_store())


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
        store = _store("plumbline attach")
        number = store.add(f"folders of rank {rank}", 1)
        found: str = store.compare_set(f"folder {number}", "", own).decode()
        if found != own and not os.path.isdir(found):
            raise UnreachableFolderError(
                f"the folder {found} of another rank does not exist on this machine: pass attach() a folder= that all "
                "machines share"
            )
        return found
