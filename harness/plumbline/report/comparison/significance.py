"""Better, worse, the same, or inconclusive: decided from the estimates of many figures at once.

**Minimum effect.** Changes below δ (5 % by default) are not reported: memory layout, the size of the environment and
the link order move times by several per cent without any change of the program (Mytkowicz, Diwan, Hauswirth and
Sweeney, ASPLOS 2009). A change below δ may be real, but is seldom caused by the change that was made.

**Decision.** A figure is the ``same`` if its interval lies within ±δ: an equivalence test, not a failure to find a
difference (Schuirmann, 1987). It is ``better`` or ``worse`` if it changed by more than δ and chance does not explain
the change. Everything else is ``inconclusive``: more launches would decide.

**Runs at different times.** The samples of two runs do not include the drift of the machine between the runs, so an
interval that excludes 0 proves that the runs differ, not that the trainers do. Such a change counts only if its
interval lies wholly beyond ±δ, which leaves δ for drift (a minimum-effect test: Murphy and Myors, 1999). Interleaved
launches have the drift on both sides: there it suffices that the estimate is beyond δ and the interval excludes 0.
A machine that drifts by more than δ between two runs is still reported as a change, and drift may hide a change:
``--interleave`` avoids both.

**Many figures.** A comparison of 300 figures must not report ``worse`` when nothing changed. The procedure of
Benjamini and Hochberg (1995) over all figures limits that to 5 % of comparisons; where something did change, at most
5 % of the reported figures are wrong, on average, and a real regression, which usually shows in several figures, is
found more often than with a family-wise bound. Figures that are correlated, as step time and throughput are, do no
harm (Benjamini and Yekutieli, 2001, prove it for one-sided tests; ``tests/comparison/test_significance.py`` measures it
here). ``same`` needs no correction: "nothing changed" is wrong if one figure changed, and that figure is called the
same in at most 2.5 % of cases, whatever the others are (an intersection-union test: Berger, 1982). The intervals shown
are those of single figures at 95 %, so one in twenty misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from scipy.special import ndtri  # type: ignore[import-untyped]
from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

from plumbline.statistics.intervals import CONFIDENCE, Estimate

MINIMUM_EFFECT: Final = 0.05
FALSE_ALARMS: Final = 1 - CONFIDENCE
MOST_LAUNCHES: Final = 1_000_000
"""More launches than this are never suggested: the noise is too large for any practical number."""


@dataclass(frozen=True)
class ChangeScale:
    """The scale on which two figures are subtracted: ``onto`` maps a sample onto it, ``off`` maps it back.

    ``change`` converts a difference on the scale to a change: a fraction of A (``%``), a difference of two shares
    (``points``) or of two counts (no unit). ``least`` converts the minimum effect to the scale. ``positive``: only
    positive figures can be mapped.
    """

    unit: str
    onto: Callable[[float], float]
    off: Callable[[float], float]
    change: Callable[[float], float]
    least: Callable[[float], float]
    positive: bool = False


def _identity(number: float) -> float:
    return number


RATIO: Final = ChangeScale("%", math.log, math.exp, math.expm1, math.log1p, positive=True)

# A share of a step: one point of it is one per cent of the step.
POINTS: Final = ChangeScale("points", _identity, _identity, _identity, _identity)

# One more event in every launch is a change, however few there are; half an event separates that from none.
COUNTS: Final = ChangeScale("", _identity, _identity, _identity, lambda effect: 0.5)

_OF_UNIT: Final = {"share": POINTS, "count": COUNTS}


def scale_of(unit: str) -> ChangeScale:
    """Return the scale for figures in ``unit``: times, rates and sizes are compared as ratios."""
    return _OF_UNIT.get(unit, RATIO)


class Decision(Enum):
    """Whether a figure changed, regardless of which direction is better."""

    SAME = "same"
    CHANGED = "changed"
    UNCLEAR = "unclear"
    CHANCE = "one of many"
    """It would count as changed if it were the only figure; among so many it is expected by chance."""


@dataclass(frozen=True)
class FigureDifference:
    """One difference, the minimum effect on its scale, and whether the launches of both sides alternated."""

    estimate: Estimate
    least: float
    in_turns: bool

    @property
    def chance(self) -> float:
        """The p-value: how likely so large a difference is if there is no change that counts."""
        if self.in_turns:
            return self.estimate.chance() if abs(self.estimate.mean) > self.least else 1.0
        return self.estimate.chance(self.least)

    @property
    def is_within(self) -> bool:
        """Whether the interval lies within the minimum effect in both directions."""
        low, high = self.estimate.interval
        return -self.least < low and high < self.least

    def enough(self, launches: int) -> int | None:
        """Return how many launches a side would show, with a power of 80 %, that nothing changed, if so.

        It extrapolates from the noise of ``launches``; None where that is more than ``MOST_LAUNCHES``.
        """
        errors = float(ndtri((1 + CONFIDENCE) / 2) + ndtri(0.9))  # half an interval, and its centre
        times = errors * self.estimate.error / self.least
        needed = launches * times * times  # multiplied, because a power raises OverflowError
        return math.ceil(needed) if needed < MOST_LAUNCHES else None


def decide(cases: Sequence[FigureDifference]) -> list[Decision]:
    """Decide about each difference; all of them are one family of tests."""
    if not cases:
        return []
    chances = [case.chance for case in cases]
    adjusted = false_discovery_control(chances)
    return [_size(*each) for each in zip(cases, chances, adjusted, strict=True)]


def _size(case: FigureDifference, chance: float, among_all: float) -> Decision:
    if among_all <= FALSE_ALARMS:
        return Decision.CHANGED
    if case.is_within:
        return Decision.SAME
    return Decision.CHANCE if chance <= FALSE_ALARMS else Decision.UNCLEAR
