"""Waits for other ranks with a limit, and names the stage that does not make progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

GRACE = 30.0
"""How many seconds a rank has to report that it waits too; the limit, if that is less."""

LOST = 2.0
"""How many seconds after a lost connection another rank has to report that it has waited too long."""

EVERYBODY = "everybody"
"""The target that a rank reports when all ranks do something together."""


class StageTimeoutError(RuntimeError):
    """Another rank has not sent or received anything for too long."""


class StageTimeout:
    """Waits for the stages of one pipeline, and for all ranks.

    Args:
        limit: Seconds; the process groups have the same timeout.
        stage: This rank's.
        first: The rank of stage 0; the others follow it.
        store: Where ranks that have waited too long report for whom, so that the stage at fault is named.
        stages: The number of stages of a pipeline.
    """

    def __init__(self, limit: float, stage: int, first: int, store: Any, stages: int) -> None:
        self.limit, self.stage, self.first, self.store, self.stages = limit, stage, first, store, stages

    @contextmanager
    def waiting(self, awaited: int | str) -> Iterator[None]:
        """Wait for a stage of this pipeline, by its number, or for an operation of all ranks, by its description.

        Raises:
            StageTimeoutError: The limit has passed.
        """
        start, rank = monotonic(), self.first + self.stage
        target = EVERYBODY if isinstance(awaited, str) else str(self.first + awaited)
        try:
            yield
        except StageTimeoutError:
            raise
        except RuntimeError as error:
            if monotonic() - start < self.limit and not self._has_said("somebody", LOST):
                raise  # the connection is lost: the other rank has ended and reports why
            self.store.set(_key("somebody"), target)
            self.store.set(_key(rank), target)
            last = self._last(rank, target)
            name = awaited if isinstance(awaited, str) else f"stage {awaited}"
            waited = f"Stage {self.stage} has waited {self.limit:g} s for {name}"
            if last is None:
                raise StageTimeoutError(
                    f"{waited}, and all ranks wait: they do not take the same steps. Check that training_step, "
                    "validation_step and the data loaders do the same on all ranks, or give a longer stage_timeout."
                ) from error
            fault = f"stage {last % self.stages}"
            between = "" if target in (EVERYBODY, str(last)) else f" (which waits, directly or not, for {fault})"
            raise StageTimeoutError(
                f"{waited}{between}: {fault}, on rank {last}, makes no progress. Check what that process does, or give "
                "a longer stage_timeout."
            ) from error

    def _last(self, rank: int, target: str) -> int | None:
        """Follow the ranks that wait for one another to one that does not wait, None if all do."""
        seen, end = {rank}, monotonic() + min(self.limit, GRACE)
        while target != EVERYBODY and int(target) not in seen:
            rank = int(target)
            seen.add(rank)
            if not self._has_said(rank, end - monotonic()):
                return rank
            target = self.store.get(_key(rank)).decode()
        others = (rank for rank in range(dist.get_world_size()) if rank not in seen)
        return next((rank for rank in others if not self._has_said(rank, end - monotonic())), None)

    def _has_said(self, who: int | str, seconds: float) -> bool:
        try:
            self.store.wait([_key(who)], timedelta(seconds=max(seconds, 0.01)))
        except RuntimeError:  # not reported, or the store is gone
            return False
        return True


def _key(who: int | str) -> str:
    return f"stage waits/{who}"


def group_with_timeout(limit: float) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))


def limit_default_group(limit: float) -> None:
    _set_pg_timeout(timedelta(seconds=limit), dist.group.WORLD)
