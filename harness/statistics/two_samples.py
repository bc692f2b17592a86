"""What a handful of launches can honestly say about the difference between two sides.

**A sample is a launch.** Steps of one launch share its memory layout, its threads and its neighbours on the machine:
a thousand of them are one draw of all that (Georges, Buytaert and Eeckhout, OOPSLA 2007; Kalibera and Jones, ISMM
2013). What is known of the noise between launches comes from three to ten numbers a side.

**Student's t, on logarithms.** Bootstrap and rank tests ask for more than that. Resampling n values understates their
variance by (n - 1)/n and never leaves their range; between equal sides a percentile bootstrap of the means, made for
5 % of error, errs in 12 % of cases at five launches and in 19 % at three, and BCa is no better. A rank test of three
against three cannot say less than 10 %, and one of five against five not less than 0.8 %, which no correction for
many figures leaves standing. Welch's t keeps its 5 % with three launches a side, also where launches are skewed,
heavy-tailed, or now and then hit by something else: such noise widens its interval sooner than it moves it.
(``tests/compare/test_estimate.py`` holds it to that.) Ratios of times are what is compared, and noise multiplies
times: so logarithms, for which the interval of B/A is that of A/B turned over.

**In turns.** Where A and B were launched one after the other, round by round, a machine that drifts moves both: the
difference within each round is a sample, and t of these differences is all there is to it. **Apart**, in two runs,
the samples do not hold what happened between the runs; ``verdict`` says what follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

CONFIDENCE: Final = 0.95

FEWEST_LAUNCHES: Final = 3
"""With two, the assumption about the noise would be everything, and the observation of it nothing."""


@dataclass(frozen=True)
class Estimate:
    """How much larger B is than A: the estimate, its standard error, and the error's degrees of freedom.

    An error of 0 means that all launches of each side agree: the difference is what it is.
    """

    difference: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """Where the difference lies with ``CONFIDENCE``."""
        half = float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.error if self.error else 0.0
        return self.difference - half, self.difference + half

    def chance(self, least: float = 0.0) -> float:
        """Return how likely so large a difference is, either way, if the true one is at most ``least`` in size.

        It is small if, and only if, an interval of that confidence lies wholly beyond ``least``.
        """
        beyond = abs(self.difference) - least
        if self.error == 0:
            return 0.0 if beyond > 0 else 1.0
        return min(1.0, 2 * float(stdtr(self.freedom, -beyond / self.error)))


def apart(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Estimate B - A from launches that have nothing to do with each other; neither their number nor noise need agree.

    Raises:
        ValueError: a side has fewer than two.
    """
    parts = [(_variance(side) / len(side), len(side) - 1) for side in (a, b)]
    squared = sum(part for part, _ in parts)
    # Welch and Satterthwaite, in parts of the whole, which do not underflow. Where nothing varies, any number will do.
    freedom = 1 / sum((part / squared) ** 2 / degrees for part, degrees in parts) if squared else math.inf
    return Estimate(fmean(b) - fmean(a), math.sqrt(squared), freedom)


def in_turns(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Estimate B - A from rounds, in each of which both were launched.

    Raises:
        ValueError: the sides have unequal numbers of launches, or fewer than two.
    """
    differences = [after - before for before, after in zip(a, b, strict=True)]
    error = math.sqrt(_variance(differences) / len(differences))
    return Estimate(fmean(differences), error, len(differences) - 1)


def _variance(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        raise ValueError("one launch says nothing of the noise between launches")
    mean = fmean(samples)
    return math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)
