"""Gives up a subject whose cells reach the time limit repeatedly: the others would too, and take hours."""

from __future__ import annotations

MOST_IN_A_ROW = 3
"""Consecutive cells of one subject that may reach the time limit; a cell that ends in time resets the count."""


class Timeouts:
    """Counts, for each subject, the cells in a row that reached the time limit of ``time_limit`` seconds."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._in_a_row: dict[str, int] = {}

    def count(self, subject: str, seconds: float | None) -> bool:
        """Take in how long a cell's launch took, None if there was none; return whether this gives the subject up."""
        if seconds is None:
            return False
        late = seconds >= self._time_limit
        self._in_a_row[subject] = self._in_a_row.get(subject, 0) + 1 if late else 0
        return self._in_a_row[subject] == MOST_IN_A_ROW

    def reason(self, subject: str) -> str | None:
        """Return why no more cells of ``subject`` are run, in a sentence; None where they are."""
        if self._in_a_row.get(subject, 0) < MOST_IN_A_ROW:
            return None
        return (
            f"{subject}: {MOST_IN_A_ROW} cells in a row reached the time limit of {self._time_limit:g} s, so its other "
            "cells are not run; mend what hangs, or raise --time-limit, and go on with --resume"
        )
