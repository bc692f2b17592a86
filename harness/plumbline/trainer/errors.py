"""The errors of the trainer: each says in one sentence what is wrong and what to do."""

from __future__ import annotations


class MisconfigurationError(ValueError):
    """What the user asked for cannot be done, or contradicts itself; the message says the way out."""


class RankError(RuntimeError):
    """A rank that the trainer started has failed; the message holds its traceback.

    ``rank`` is its global rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
