"""Exchanges values between all ranks through the store of torch.distributed, apart from the script's collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

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

    def leave(self, why: str) -> None:
        """Tell ranks that wait for this one, now or at a later step, that it will not arrive, and ``why``."""
        self._give({"left": why})

    def _give(self, own: dict[str, Any]) -> int:
        """Write this rank's message for the next round; return the rank."""
        rank = torch.distributed.get_rank()
        if self._store is None:
            self._store = _store(f"{self._name} {_recording()}")
        self._round += 1
        self._store.set(f"{self._round} {rank}", json.dumps(own))
        return rank


def _recording() -> int:
    if not _RECORDING:
        number = _store("plumbline recordings").add(f"of rank {torch.distributed.get_rank()}", 1)
        _RECORDING.append(number)
    return _RECORDING[0]


def _store(name: str) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.PrefixStore(name, c10d._get_default_store())
