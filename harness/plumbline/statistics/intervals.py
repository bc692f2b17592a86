"""Means of small samples and differences between them, with standard errors and confidence intervals: Student's t.

**A sample is a launch.** The steps of one launch share its memory layout, its threads and its neighbours on the
machine: a thousand of them are one draw of all that (Georges, Buytaert and Eeckhout, OOPSLA 2007; Kalibera and Jones,
ISMM 2013). The noise between launches has to be estimated from three to ten numbers.

**Student's t**, because bootstrap and rank tests need more than that. Resampling n values underestimates their variance
by (n - 1)/n and never leaves their range: a percentile bootstrap of three launches contains the true value 75 times in
a hundred, and t does 94 to 97 times, also where noise is skewed or one launch in ten is disturbed
(``tests/performance/test_estimate.py``). A rank test of three against three cannot report less than 10 %, and one of
five against five not less than 0.8 %, which no correction for many figures leaves significant.

**On logarithms**, because noise multiplies times and rates, and the interval of B/A is then the inverse of that of A/B.

**Welch's t** compares independent samples. It keeps its 5 % error with three launches per side, even if launches are
skewed, heavy-tailed, or sometimes disturbed: such noise widens its interval sooner than it moves it
(``tests/comparison/test_estimate.py``). Between equal sides, a percentile bootstrap of the means that is meant to err
in 5 % of cases errs in 12 % at five launches and in 19 % at three, and BCa is no better.

**A paired t** compares rounds. If A and B were launched in turns, round by round, a machine that drifts moves both:
the difference within each round is a sample. Two separate runs do not record what happened between them;
``report.comparison.figure_changes`` allows for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

CONFIDENCE: Final = 0.95

FEWEST_LAUNCHES: Final = 3
"""With two, an interval is thirteen standard errors wide to each side: it would never exclude anything."""

WIDEST_RATIO: Final = 2.0
"""A figure whose upper bound is twice its lower one cannot even distinguish two devices from one: it is refused."""

WIDEST_SHARE: Final = 0.5
"""A share of the step that can be anything between a quarter and three quarters names no cause: it is refused."""

_LARGEST_EXPONENT = 700.0  # exp(709.8) is the largest float


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, and the degrees of freedom of that error. An error of 0: all samples are equal."""

    mean: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that contains the true mean with probability ``CONFIDENCE``."""
        half = float(stdtrit(self.freedom, (1 + CONFIDENCE) / 2)) * self.error if self.error else 0.0
        return self.mean - half, self.mean + half

    def chance(self, least: float = 0.0) -> float:
        """Return the two-sided p-value of a mean this large if the true one is at most ``least`` in size.

        It is below 1 - c if, and only if, the interval of confidence c lies wholly beyond ``least``.
        """
        beyond = abs(self.mean) - least
        if self.error == 0:
            return 0.0 if beyond > 0 else 1.0
        return min(1.0, 2 * float(stdtr(self.freedom, -beyond / self.error)))


def estimate_mean(samples: Sequence[float]) -> Estimate:
    """Estimate the mean of the distribution that ``samples`` come from.

    Raises:
        ValueError: there are fewer than two samples.
    """
    return Estimate(fmean(samples), math.sqrt(variance(samples) / len(samples)), len(samples) - 1)


def variance(samples: Sequence[float]) -> float:
    """Return the unbiased sample variance; exactly 0 for equal samples."""
    if len(samples) < 2:
        raise ValueError("one launch says nothing about the noise between launches: at least two are needed")
    if min(samples) == max(samples):
        return 0.0
    mean = fmean(samples)
    return math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)


@dataclass(frozen=True)
class FigureInterval:
    """A figure with its bounds. ``refusal`` says in a sentence why it is too uncertain to report, or is None."""

    value: float
    low: float
    high: float
    refusal: str | None


def figure_interval(samples: Sequence[float], *, share: bool = False) -> FigureInterval:
    """Return the median of ``samples``, one per launch, with a confidence interval for the typical launch.

    The figure is ratio-scaled, or a ``share`` of a whole (0 to 1). If a sample is not positive, no logarithms are
    taken.

    Raises:
        ValueError: there are fewer than two samples.
    """
    logarithmic = not share and min(samples) > 0
    scaled = [math.log(sample) for sample in samples] if logarithmic else list(samples)
    estimate = estimate_mean(scaled)
    if not estimate.error:
        return FigureInterval(samples[0], samples[0], samples[0], None)
    typical = median(scaled)
    # The median of samples from a bimodal distribution can be outside the interval of the mean.
    low, high = min(estimate.interval[0], typical), max(estimate.interval[1], typical)
    if logarithmic:
        typical, low, high = math.exp(typical), math.exp(low), math.exp(min(high, _LARGEST_EXPONENT))
    if share:
        low, high = max(low, 0.0), min(high, 1.0)
    refusal = why_unstable(low, high, share=share) if logarithmic or share else None
    return FigureInterval(typical, low, high, refusal)


def why_unstable(low: float, high: float, *, share: bool = False) -> str | None:
    """Return, in a sentence, why a figure between these bounds is too uncertain to report; None if it is not."""
    wide = high - low >= WIDEST_SHARE if share else high >= WIDEST_RATIO * low
    return f"unstable: between {low:.3g} and {high:.3g}; increase --launches to narrow it" if wide else None


def welch_difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Estimate the mean of B minus that of A from independent samples, whose numbers and variances can differ.

    Raises:
        ValueError: a side has fewer than two samples.
    """
    parts = [(variance(side) / len(side), len(side) - 1) for side in (a, b)]
    return Estimate(fmean(b) - fmean(a), *combined_error(parts))


def combined_error(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the standard error of a sum and its degrees of freedom, from pairs of squared error and degrees."""
    squared = sum(part for part, _ in parts)
    # Welch-Satterthwaite, with fractions of the sum, which do not underflow. Without variance, any number will do.
    freedom = 1 / sum((part / squared) ** 2 / degrees for part, degrees in parts) if squared else math.inf
    return math.sqrt(squared), freedom


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Estimate the mean of B - A from rounds in which both were launched.

    Raises:
        ValueError: the sides have different numbers of samples, or fewer than two.
    """
    return estimate_mean([after - before for before, after in zip(a, b, strict=True)])
