"""Better, worse, the same, or not to be told: from the estimates of many figures at once.

**What is claimed.** With δ the least effect anybody asks about (``scale``), a figure is the ``same`` if its interval
lies within ±δ: an equivalence, not a failure to find a difference (Schuirmann, 1987). It is ``better`` or ``worse``
if it changed by more than δ, and chance does not explain it. Everything else is ``inconclusive``: more launches tell.

**Apart, drift is added.** The samples of two runs do not hold what the machine did between the runs, so an interval
that excludes 0 proves that the runs differ, not that the trainers do. A change between runs made apart counts only if
it lies wholly beyond ±δ, which leaves δ to drift (a minimum-effect test: Murphy and Myors, 1999). In turns, drift is
in both sides: it is enough that the estimate is beyond δ, and that the interval excludes 0. A machine that drifts by
more than δ between two runs will still be taken for a change, and drift may hide one as well: ``--interleave`` is what
helps against both.

**Three hundred figures, one alarm.** What costs trust is a run that says ``worse`` when nothing changed. Benjamini
and Hochberg's procedure (1995) over all figures of a comparison keeps that to 5 % a comparison when nothing changed
anywhere; when something did, at most 5 % of what is named is named wrongly, on average, and a real regression, which
mostly shows in several figures at once, is found more readily than by a family-wise bound. Figures that move together,
as step time and throughput do, are no hindrance (Benjamini and Yekutieli, 2001, prove it for tests to one side, and
``tests/compare/test_verdict.py`` measures it for these).
``same`` needs no correction: "nothing changed" is wrong if one figure changed, and that one is called the same in at
most 2.5 % of cases, whatever the others are (an intersection-union test: Berger, 1982). The intervals shown are each
figure's own, at 95 %, so one of twenty misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from scipy.special import ndtri  # type: ignore[import-untyped]
from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

from harness.statistics.intervals import CONFIDENCE, Estimate

FALSE_ALARMS: Final = 1 - CONFIDENCE
MOST_LAUNCHES: Final = 1_000_000
"""More than anybody would make: figures so far apart, or so near 0, that no number of launches would tell."""


class Size(Enum):
    """What can be said of a difference before anybody says which way is better."""

    SAME = "same"
    CHANGED = "changed"
    UNCLEAR = "unclear"
    CHANCE = "one of many"
    """It would count if it were the only figure; among so many it is to be expected."""


@dataclass(frozen=True)
class Case:
    """One difference, the least effect on its scale, and whether both sides were launched in turns."""

    estimate: Estimate
    least: float
    in_turns: bool

    @property
    def chance(self) -> float:
        """How likely it is to look so much like a change that counts, if it is none."""
        if self.in_turns:
            return self.estimate.chance() if abs(self.estimate.mean) > self.least else 1.0
        return self.estimate.chance(self.least)

    @property
    def is_within(self) -> bool:
        """Whether the interval lies within the least effect, either way."""
        low, high = self.estimate.interval
        return -self.least < low and high < self.least

    def enough(self, launches: int) -> int | None:
        """Return about how many launches a side would show that nothing changed, if so, in four cases of five.

        It goes by the noise of as many as were made; None where nobody would make so many.
        """
        errors = float(ndtri((1 + CONFIDENCE) / 2) + ndtri(0.9))  # of an interval's half, and of its middle
        times = errors * self.estimate.error / self.least
        needed = launches * times * times  # a product becomes infinite where a power raises
        return math.ceil(needed) if needed < MOST_LAUNCHES else None


def sizes(cases: Sequence[Case]) -> list[Size]:
    """Say of each difference how large it is; all of them are one family."""
    if not cases:
        return []
    chances = [case.chance for case in cases]
    adjusted = false_discovery_control(chances)
    return [_size(*each) for each in zip(cases, chances, adjusted, strict=True)]


def _size(case: Case, chance: float, among_all: float) -> Size:
    if among_all <= FALSE_ALARMS:
        return Size.CHANGED
    if case.is_within:
        return Size.SAME
    return Size.CHANCE if chance <= FALSE_ALARMS else Size.UNCLEAR
