"""An interval contains the truth as often as it promises, with three launches per side, whatever their noise."""

from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plumbline.statistics.intervals import CONFIDENCE, paired_difference, welch_difference

NOISES = {
    "normal": lambda noise: noise.gauss(0, 0.02),
    "skewed": lambda noise: 0.02 * noise.expovariate(1),
    "heavy-tailed": lambda noise: 0.01 * noise.gauss(0, 1) / math.sqrt(noise.expovariate(1)),
    "now and then hit": lambda noise: noise.gauss(0, 0.01) + (noise.random() < 0.15) * noise.uniform(0.05, 0.3),
}
REPETITIONS = 4000
# Three standard errors of the counted share: a right method exceeds this once in 700 times.
ALLOWED = 1 - CONFIDENCE + 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / REPETITIONS)

samples = st.lists(st.floats(-5, 5), min_size=2, max_size=10)


@pytest.mark.parametrize("number", [3, 5, 10])
@pytest.mark.parametrize("shape", NOISES)
@pytest.mark.parametrize("method", [welch_difference, paired_difference])
def test_intervals_miss_no_more_often_than_they_say(method, shape, number):
    noise = random.Random(f"{shape} {number}")
    draw = NOISES[shape]
    missed = 0
    for _ in range(REPETITIONS):
        low, high = method([draw(noise) for _ in range(number)], [0.1 + draw(noise) for _ in range(number)]).interval
        missed += not low <= 0.1 <= high
    assert missed / REPETITIONS <= ALLOWED


def test_unequal_noise_and_numbers_do_not_shorten_the_interval():
    noise = random.Random(1)
    missed = 0
    for _ in range(REPETITIONS):
        a, b = ([noise.gauss(0, spread) for _ in range(number)] for spread, number in ((0.05, 3), (0.01, 10)))
        low, high = welch_difference(a, b).interval
        missed += not low <= 0 <= high
    assert missed / REPETITIONS <= ALLOWED


@pytest.mark.parametrize(("number", "at_least"), [(3, 0.15), (5, 0.10)])
def test_a_bootstrap_of_so_few_launches_misses_more_often_than_it_says(number, at_least):
    """This is why Student's t is used: the test measures the reason given in the module."""
    noise = np.random.default_rng(1)
    repetitions, resamples = 1000, 500
    a, b = (noise.normal(0, 0.02, (repetitions, number)) for _ in range(2))
    drawn = []
    for side in (a, b):
        chosen = noise.integers(0, number, (repetitions, resamples, number))
        drawn.append(np.take_along_axis(side[:, None, :], chosen, axis=2).mean(axis=2))
    low, high = np.percentile(drawn[1] - drawn[0], [2.5, 97.5], axis=1)
    assert np.mean((low > 0) | (high < 0)) > at_least


def test_rounds_take_the_machine_s_drift_out():
    """In turns, a machine that becomes half as fast while measuring does not affect the comparison."""
    noise = random.Random(1)
    drift = [0.5 * index / 9 for index in range(10)]
    a, b = ([slower + noise.gauss(0, 0.005) for slower in drift] for _ in range(2))
    low, high = paired_difference(a, b).interval
    assert high - low < 0.02 < 0.2 < welch_difference(a, b).interval[1] - welch_difference(a, b).interval[0]


@given(samples, samples, st.floats(0.001, 1000))
def test_the_unit_of_a_figure_does_not_matter(a, b, factor):
    """Milliseconds instead of seconds shift both logarithms equally."""
    moved = welch_difference([x + math.log(factor) for x in a], [x + math.log(factor) for x in b])
    assert moved.mean == pytest.approx(welch_difference(a, b).mean, abs=1e-9)
    assert moved.error == pytest.approx(welch_difference(a, b).error, abs=1e-6)


@given(samples, samples)
def test_b_against_a_is_a_against_b_turned_over(a, b):
    one, other = welch_difference(a, b), welch_difference(b, a)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert one.chance(0.1) == pytest.approx(other.chance(0.1))


@given(samples, samples, st.floats(0, 2))
def test_a_chance_is_small_just_where_the_interval_lies_beyond(a, b, least):
    estimate = welch_difference(a, b)
    low, high = estimate.interval
    gap = max(low - least, -least - high)
    assume(abs(gap) > 1e-9)
    assert (estimate.chance(least) < 1 - CONFIDENCE) == (gap > 0)


@given(st.floats(0.1, 10), st.integers(2, 10), st.integers(2, 10))
def test_launches_that_agree_leave_no_doubt(value, before, after):
    estimate = welch_difference([value] * before, [2 * value] * after)
    assert estimate.interval == pytest.approx((value, value))
    assert estimate.chance() == pytest.approx(0)
    assert welch_difference([value] * before, [value] * after).chance(0.01) == 1


def test_one_launch_says_nothing():
    with pytest.raises(ValueError, match="one launch"):
        welch_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="one launch"):
        paired_difference([1.0], [2.0])


def test_half_rounds_are_no_rounds():
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def test_the_estimate_is_the_difference_of_the_means():
    assert welch_difference([1, 2, 4], [2, 3]).mean == pytest.approx(fmean([2, 3]) - fmean([1, 2, 4]))
