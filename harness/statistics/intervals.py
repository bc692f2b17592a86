"""What a few launches say about a figure: what is typical of a launch, and an interval that holds it, 95 % of the time.

**A sample is a launch.** The steps of one launch share its memory layout and its neighbours on the machine: a thousand
of them are one draw of all that (Kalibera and Jones, ISMM 2013). **The figure is the median launch. The interval is
Student's t, on logarithms**, since times and rates are disturbed by factors. It holds what is typical 94 to 97 times in
a hundred with three launches, five or ten, also where noise is skewed or where one launch in ten is hit by something
else (``tests/performance/test_estimate.py``); a percentile bootstrap of three launches does so 75 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final

from scipy.special import stdtrit  # type: ignore[import-untyped]

CONFIDENCE: Final = 0.95

FEWEST_LAUNCHES: Final = 3
"""With two, the interval is thirteen standard errors wide to each side: nothing would ever be told."""

WIDEST_RATIO: Final = 2.0
"""A figure whose upper bound is twice its lower one cannot even tell two devices from one: it is refused."""

WIDEST_SHARE: Final = 0.5
"""A share of the step that may be anything between a quarter and three quarters names no cause: it is refused."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its bounds. ``refusal`` says in a sentence why it is worth nothing, None where it is."""

    value: float
    low: float
    high: float
    refusal: str | None


def estimate(samples: Sequence[float], *, share: bool = False) -> Estimate:
    """Return what ``samples``, one a launch, say of a ratio-scaled figure, or of a ``share`` of a whole (0 to 1).

    A figure that is not positive has no logarithm: it is taken as it is.

    Raises:
        statistics.StatisticsError: there are fewer than two samples.
    """
    ratio = not share and min(samples) > 0
    scaled = [math.log(sample) for sample in samples] if ratio else list(samples)
    half = float(stdtrit(len(samples) - 1, (1 + CONFIDENCE) / 2)) * stdev(scaled) / math.sqrt(len(samples))
    if not half:
        return Estimate(samples[0], samples[0], samples[0], None)
    typical = median(scaled)
    # Of many launches in two heaps the median lies in one, and the interval between them.
    low, high = min(fmean(scaled) - half, typical), max(fmean(scaled) + half, typical)
    if ratio:
        # Nobody needs to be told how many times 10³⁰⁸ it may be.
        typical, low, high = math.exp(typical), math.exp(low), math.exp(min(high, 700.0))
    if share:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(typical, low, high, unstable(low, high, share=share) if ratio or share else None)


def unstable(low: float, high: float, *, share: bool = False) -> str | None:
    """Return, in a sentence, that a figure between these bounds is worth nothing; None where it is worth something."""
    wide = high - low >= WIDEST_SHARE if share else high >= WIDEST_RATIO * low
    return (
        f"unstable: it lies somewhere between {low:.3g} and {high:.3g}; more --launches narrow that" if wide else None
    )
