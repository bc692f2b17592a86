"""The diagnosis of a cell is the bad finding that explains the others."""

from __future__ import annotations

import itertools

import pytest

from plumbline.core.finding import ORDER, UNEXPLAINED, Finding, diagnosis
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS
from plumbline.judge.trace_analysis import TraceAnalysis


def bad(check, cause=None):
    return Finding(check, Outcome.FAILED, "", cause=cause)


def test_what_is_right_explains_nothing():
    right = (Finding("gradients", Outcome.PASSED, ""), Finding("samples", Outcome.DEVIATES, "", cause="unasked"))
    assert diagnosis(right) is None


def test_a_named_cause_comes_before_an_unexplained_one():
    named = bad("update", "named")
    assert diagnosis((bad("gradients", UNEXPLAINED), bad("samples"), named)) is named


def test_weights_that_are_no_numbers_come_before_an_order_of_samples():
    samples, nan = bad("samples", "set-epoch-never-called"), bad("gradients", "not-finite")
    assert diagnosis((samples, nan)) is nan
    assert diagnosis((samples, bad("update", "not-finite"))).check == "update"


def test_a_single_step_comes_before_a_whole_training():
    first = bad("gradients", UNEXPLAINED)
    assert diagnosis((bad("training", "named"), first)) is first


@pytest.mark.parametrize(("origin", "consequence"), list(itertools.pairwise(ORDER)))
def test_the_origin_comes_before_its_consequence(origin, consequence):
    first, then = bad(origin, "one"), bad(consequence, "other")
    assert diagnosis((then, first)) is first
    assert diagnosis((first, then)) is first


def test_every_check_has_its_place():
    assert set(CHECKS[TraceAnalysis]) | {"launch"} == set(ORDER)


def test_a_check_that_nobody_placed_comes_last():
    new = bad("invented-tomorrow", "named")
    assert diagnosis((new, bad("update", "named"))).check == "update"
    assert diagnosis((new,)) is new
