"""Intervals of figures contain the truth as often as promised, and meaningless figures are refused."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.statistics.intervals import FEWEST_LAUNCHES, WIDEST_RATIO, WIDEST_SHARE, figure_interval, why_unstable

positive = st.floats(1e-6, 1e9)
several = st.lists(positive, min_size=FEWEST_LAUNCHES, max_size=10)

NOISE = {
    "even": lambda draw: draw.gauss(0, 0.05),
    "now and then slow": lambda draw: draw.gauss(0, 0.02) + (0.3 if draw.random() < 0.1 else 0.0),
    "skewed": lambda draw: draw.expovariate(20.0),
}
"""By how much a launch is longer than the true time, as a logarithm."""


@pytest.mark.parametrize("launches", [3, 5, 10])
@pytest.mark.parametrize("noise", NOISE)
def test_the_bounds_hold_what_is_typical_as_often_as_they_promise(noise, launches):
    draw = random.Random(20_261_120)
    typical = math.exp(median(NOISE[noise](draw) for _ in range(50_001)))
    tries = 3000
    held = 0
    for _ in range(tries):
        found = figure_interval([math.exp(NOISE[noise](draw)) for _ in range(launches)])
        held += found.low <= typical <= found.high
    # The promise is 0.95; counting 3000 tries has an error of 0.004. A bootstrap of three launches reaches 0.75.
    assert held / tries > 0.92


@given(several, st.floats(0.001, 1000))
def test_another_unit_changes_nothing_but_the_unit(samples, factor):
    one, other = figure_interval(samples), figure_interval([sample * factor for sample in samples])
    assert (one.refusal is None) == (other.refusal is None) or math.isclose(one.high / one.low, WIDEST_RATIO)
    assert other.value == pytest.approx(one.value * factor)
    if one.high < 1e200:
        assert (other.low, other.high) == pytest.approx((one.low * factor, one.high * factor), rel=1e-6)


@given(several)
def test_the_figure_lies_within_its_bounds(samples):
    found = figure_interval(samples)
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)


@given(st.lists(st.floats(0, 1), min_size=FEWEST_LAUNCHES, max_size=10))
def test_a_share_stays_a_share(samples):
    found = figure_interval(samples, share=True)
    assert 0 <= found.low <= found.high <= 1


@given(positive, st.integers(FEWEST_LAUNCHES, 10))
def test_launches_that_agree_leave_no_doubt(value, launches):
    found = figure_interval([value] * launches)
    assert (found.low, found.value, found.high, found.refusal) == (value, value, value, None)


def test_what_could_be_twice_as_much_is_refused_with_a_sentence():
    wide = figure_interval([1.0, 2.0, 4.0])
    assert wide.refusal is not None
    assert "unstable" in wide.refusal
    assert "--launches" in wide.refusal
    assert figure_interval([1.0, 1.01, 1.02]).refusal is None


def test_a_share_is_refused_only_if_it_could_be_almost_anything():
    assert figure_interval([0.001, 0.01, 0.03], share=True).refusal is None
    assert figure_interval([0.1, 0.5, 0.9], share=True).refusal is not None
    assert why_unstable(0.0, WIDEST_SHARE, share=True) is not None


def test_nothing_is_still_a_figure():
    found = figure_interval([0.0, 0.0, 1.0])
    assert found.refusal is None
    assert found.value == 0
