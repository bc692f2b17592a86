"""How the comparison of a cell, or of a figure, may end: the words, worst first. The standard library only."""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    """How the end of a cell changed.

    ``LOST``: what was answered is not any more. ``NEW``: what was not, is. ``CHANGED``: answered both times, neither
    good nor bad enough for one of the others, as from passed to deviates.
    """

    NEWLY_FAILING = "newly failing"
    LOST = "lost coverage"
    CHANGED = "changed"
    FIXED = "fixed"
    NEW = "new"


class Verdict(str, Enum):
    """What became of a figure."""

    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    BETTER = "better"
    SAME = "same"
