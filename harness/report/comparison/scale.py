"""On what scale a figure is compared, and how small a change of it nobody asks about.

The least effect (5 % unless said otherwise) is a statement about machines: how a program lies in memory, what its
environment's size or its link order is, moves times by several per cent without anybody having changed the program
(Mytkowicz, Diwan, Hauswirth and Sweeney, ASPLOS 2009). A change below that may be real, and is seldom the change that
was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LEAST_EFFECT: Final = 0.05


@dataclass(frozen=True)
class Scale:
    """``onto`` takes a sample to where differences mean something, ``off`` takes it back.

    ``change`` makes a change of a difference there: a part of A (``%``), a difference of two shares (``points``), or
    of two counts (no unit). ``least`` is what becomes of the least effect there. ``positive``: nothing but positive
    figures have a place on it.
    """

    unit: str
    onto: Callable[[float], float]
    off: Callable[[float], float]
    change: Callable[[float], float]
    least: Callable[[float], float]
    positive: bool = False


def _as_it_is(number: float) -> float:
    return number


RATIO: Final = Scale("%", math.log, math.exp, math.expm1, math.log1p, positive=True)

# A share of a step: as many points of it are as many per cent of the step.
POINTS: Final = Scale("points", _as_it_is, _as_it_is, _as_it_is, _as_it_is)

# One more in every launch counts, however few there were; half an event a launch lies between that and none.
COUNTS: Final = Scale("", _as_it_is, _as_it_is, _as_it_is, lambda effect: 0.5)

_OF_UNIT: Final = {"share": POINTS, "count": COUNTS}


def scale_of(unit: str) -> Scale:
    """Return the scale of figures in ``unit``: times, rates and sizes are compared as ratios."""
    return _OF_UNIT.get(unit, RATIO)
