"""The trainer's errors. Each says in one sentence what is wrong and what to do."""

from __future__ import annotations


class MisconfigurationError(ValueError):
    """The user's request is impossible or contradictory. The message says how to fix it."""


class RankError(RuntimeError):
    """A rank that the trainer started has failed. The message contains its traceback.

    ``rank`` is its global rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
