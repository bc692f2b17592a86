"""From errors to outcomes: right within the limit, the contract where it differs, nothing else."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.outcome import Outcome
from plumbline.judge.findings import compare_with_one, compare_with_two
from plumbline.judge.oracle.noise import Deviation, larger

ERRORS = st.one_of(st.floats(0, 1e6), st.sampled_from([math.inf, math.nan]))
LIMIT = 10.0


def judged(whole, contract, gap):
    return compare_with_two(
        "gradients",
        "gradients",
        one_device=Deviation(whole),
        contract=Deviation(contract),
        gap=gap,
        limit=LIMIT,
        promise="the contract says",
    )


@given(ERRORS)
def test_right_is_what_stays_within_the_limit(error):
    assert (compare_with_one("update", "weights", "right", Deviation(error), LIMIT).outcome is Outcome.PASSED) == (
        error <= LIMIT
    )


def test_an_exact_comparison_allows_no_error_at_all():
    assert compare_with_one("update", "weights", "right", Deviation(0.0), 0.0).outcome is Outcome.PASSED
    assert compare_with_one("update", "weights", "right", Deviation(1e-300), 0.0).outcome is Outcome.FAILED


def test_what_meets_one_device_passes():
    assert judged(1.0, 900.0, 901.0).outcome is Outcome.PASSED


def test_what_meets_only_the_contract_deviates():
    assert judged(900.0, 1.0, 901.0).outcome is Outcome.DEVIATES


def test_what_meets_neither_fails():
    assert judged(900.0, 800.0, 901.0).outcome is Outcome.FAILED


def test_where_rounding_explains_the_difference_both_are_one():
    assert judged(2.0, 1.0, 3.0).outcome is Outcome.PASSED


@given(ERRORS, ERRORS, ERRORS)
def test_nothing_passes_or_deviates_that_is_outside_both_limits(whole, contract, gap):
    outcome = judged(whole, contract, gap).outcome
    if not (whole <= LIMIT or contract <= LIMIT):
        assert outcome is Outcome.FAILED
    if outcome is Outcome.DEVIATES:
        assert contract <= LIMIT
        assert not gap <= LIMIT


@given(st.lists(ERRORS, min_size=1))
def test_the_worst_error_is_kept_and_none_is_worse_than_no_number(errors):
    worst = None
    for step, error in enumerate(errors):
        worst = larger(worst, Deviation(error, step))
    if any(math.isnan(error) for error in errors):
        assert math.isnan(worst.x_noise)
    else:
        assert worst.x_noise == max(errors)
        assert worst.step == errors.index(max(errors)), "the earliest of equals"
