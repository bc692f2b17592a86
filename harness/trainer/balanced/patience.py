"""Waiting for another stage, with a limit: whoever waits too long says which stage does not go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist

GRACE = 30.0
"""How many seconds, and no longer than the limit, a stage is given to say that it waits as well."""


class StageTimeoutError(RuntimeError):
    """Another stage has sent, or received, nothing for too long."""


class Patience:
    """Waits for stages of one pipeline.

    Args:
        limit: Seconds. The process groups that are waited on have it as their timeout.
        stage: This rank's.
        first: The rank of stage 0; the others follow it.
        store: Where ranks that have waited too long say for which stage, so that the one at fault is named and not one
            between.

    """

    def __init__(self, limit: float, stage: int, first: int, store: Any) -> None:
        self.limit, self.stage, self.first, self.store = limit, stage, first, store

    @contextmanager
    def waiting(self, stage: int) -> Iterator[None]:
        """Wait for a stage.

        Raises:
            StageTimeoutError: The limit has passed.

        """
        start = monotonic()
        try:
            yield
        except RuntimeError as error:
            if monotonic() - start < self.limit:
                raise  # the connection is lost: the other one has ended, and says why
            self.store.set(self._key(self.stage), str(stage))
            last = self._last(stage)
            between = "" if last == stage else f" (it waits itself, in the end for stage {last})"
            raise StageTimeoutError(
                f"Stage {self.stage} has waited {self.limit:g} s for stage {stage}{between}: stage {last}, on rank "
                f"{self.first + last}, does not go on. See what that process does, or give a longer stage_timeout."
            ) from error

    def _last(self, stage: int) -> int:
        """Follow those who wait for one another, and return the stage that does not say that it waits."""
        seen = {self.stage}
        while stage not in seen:
            seen.add(stage)
            try:
                self.store.wait([self._key(stage)], timedelta(seconds=min(self.limit, GRACE)))
            except RuntimeError:  # it does not
                return stage
            stage = int(self.store.get(self._key(stage)))
        return stage

    def _key(self, stage: int) -> str:
        return f"stage waits/{self.first + stage}"


def patient_group(limit: float) -> Any:
    """Return a gloo group of all ranks, on which nobody waits longer than ``limit`` seconds."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
