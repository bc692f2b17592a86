"""Gives up a subject whose cells reach the time limit repeatedly, because its other cells could take hours."""

from __future__ import annotations

MOST_IN_A_ROW = 3
"""Consecutive cells at the time limit after which a subject is given up. A cell that ends in time resets the count."""


class Timeouts:
    """Counts the consecutive cells of each subject that reached ``time_limit``, in seconds."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._in_a_row: dict[str, int] = {}

    def count(self, subject: str, seconds: float | None) -> bool:
        """Count a cell whose launch took ``seconds``, if any; return whether the subject is given up now."""
        if seconds is None:
            return False
        late = seconds >= self._time_limit
        self._in_a_row[subject] = self._in_a_row.get(subject, 0) + 1 if late else 0
        return self._in_a_row[subject] == MOST_IN_A_ROW

    def reason(self, subject: str) -> str | None:
        """Return why no more cells of ``subject`` are run, or None."""
        if self._in_a_row.get(subject, 0) < MOST_IN_A_ROW:
            return None
        return (
            f"{subject}: {MOST_IN_A_ROW} cells in a row reached the time limit of {self._time_limit:g} s, so its other "
            "cells are not run. Fix the hang or raise --time-limit, then continue with --resume."
        )
