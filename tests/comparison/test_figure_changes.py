"""A figure's verdict: from its launches, its scale and its direction; and the reason if there is none."""

from __future__ import annotations

import json
import random
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plumbline.report.comparison.alignment import CellPair, CellRecords
from plumbline.report.comparison.compare import compare_runs
from plumbline.report.comparison.figure_changes import FigureVerdict, figure_changes


@pytest.fixture(scope="module")
def cell(place):
    return place()


@pytest.fixture(scope="module")
def verdict_on(measured, cell):
    """Returns the verdict on one metric, from the launches of both sides."""

    def say(metric, a, b, *, turns=False, effect=0.05, **others):
        sides = (CellRecords((), (measured(cell, metric, side, **others),)) for side in (a, b))
        (change,) = figure_changes([CellPair("a cell", "", *sides)], turns=turns, effect=effect, comparable=True)
        return change

    return say


def test_faster_and_slower(verdict_on):
    fast, slow = [100.0, 101, 99, 100, 102], [80.0, 81, 79, 80, 82]
    assert verdict_on("throughput", fast, slow).verdict is FigureVerdict.WORSE
    assert verdict_on("throughput", slow, fast).verdict is FigureVerdict.BETTER
    assert verdict_on("step_p50", fast, slow).verdict is FigureVerdict.BETTER
    assert verdict_on("step_p50", slow, fast).verdict is FigureVerdict.WORSE


def test_the_change_is_in_parts_of_a_and_its_interval_holds_it(verdict_on):
    change = verdict_on("throughput", [100.0, 101, 99, 100, 102], [80.0, 81, 79, 80, 82])
    assert change.change == pytest.approx(-0.2, abs=0.005)
    assert change.change_unit == "%"
    assert change.low < change.change < change.high < -0.1


def test_the_same_launches_are_the_same(verdict_on):
    change = verdict_on("step_p50", [0.010, 0.0101, 0.0099], [0.010, 0.0101, 0.0099])
    assert (change.verdict, change.change) == (FigureVerdict.SAME, 0.0)


def test_a_share_is_compared_in_points(verdict_on):
    """From 0.1 % to 0.3 % of a step is three times as much, but not a problem."""
    change = verdict_on("data_wait", [0.001, 0.0012, 0.0011], [0.003, 0.0031, 0.0033])
    assert (change.verdict, change.change_unit) == (FigureVerdict.SAME, "points")
    assert verdict_on("data_wait", [0.001, 0.0012, 0.0011], [0.2, 0.21, 0.2]).verdict is FigureVerdict.WORSE


def test_events_are_counted(verdict_on):
    assert verdict_on("out_of_memory", [0, 0, 0], [0, 0, 0]).verdict is FigureVerdict.SAME
    assert verdict_on("out_of_memory", [0, 0, 0], [1, 1, 1]).verdict is FigureVerdict.WORSE
    assert verdict_on("out_of_memory", [0, 0, 0], [0, 0, 1]).verdict is FigureVerdict.INCONCLUSIVE


def test_bytes_that_always_agree_are_what_they_are(verdict_on):
    small, large = [2.0**30] * 3, [1.2 * 2.0**30] * 3
    assert verdict_on("memory_allocated_peak", small, large).verdict is FigureVerdict.WORSE
    assert verdict_on("memory_allocated_peak", large, small).verdict is FigureVerdict.BETTER
    assert verdict_on("memory_allocated_peak", small, [2.0**30 + 512] * 3).verdict is FigureVerdict.SAME


def test_what_was_not_there_has_no_ratio(verdict_on):
    new = verdict_on("memory_allocated_peak", [0, 0, 0], [512, 512, 512])
    assert (new.verdict, new.change) == (FigureVerdict.WORSE, None)
    assert verdict_on("memory_allocated_peak", [512, 512, 512], [0, 0, 0]).verdict is FigureVerdict.BETTER
    assert verdict_on("memory_allocated_peak", [0, 0, 0], [0, 0, 0]).verdict is FigureVerdict.SAME
    assert verdict_on("memory_allocated_peak", [0, 0, 0], [0, 512, 512]).verdict is FigureVerdict.INCONCLUSIVE


def test_where_neither_way_is_better_a_change_is_told_and_not_judged(verdict_on):
    change = verdict_on("step_p50", [1.0, 1.01, 0.99], [2.0, 2.02, 1.98], better=None)
    assert change.verdict is FigureVerdict.INCONCLUSIVE
    assert "neither direction counts as better" in change.reason
    assert verdict_on("step_p50", [1.0, 1.01, 0.99], [1.0, 1.01, 0.99], better=None).verdict is FigureVerdict.SAME


def test_a_refused_figure_is_inconclusive_for_its_own_reason(verdict_on):
    change = verdict_on("step_p50", [1.0, 3.0, 2.0], [2.0, 9.0, 1.0], refusal="launches spread by 60 %", value=None)
    assert (change.verdict, change.reason) == (FigureVerdict.INCONCLUSIVE, "A: launches spread by 60 %")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_fewer_than_three_launches_say_nothing(verdict_on, number):
    change = verdict_on("step_p50", [1.0] * number, [5.0] * 5)
    assert change.verdict is FigureVerdict.INCONCLUSIVE
    assert "fewer than 3" in change.reason


def test_rounds_that_are_not_whole_are_taken_apart(verdict_on):
    a, b = [1.0, 1.01, 0.99, 1.0], [1.0, 1.01, 0.99]
    assert verdict_on("step_p50", a, b, turns=True) == verdict_on("step_p50", a, b, turns=False)


def test_the_least_effect_is_the_user_s(verdict_on):
    a, b = [1.0, 1.001, 0.999, 1.0], [1.03, 1.031, 1.029, 1.03]
    assert verdict_on("step_p50", a, b).verdict is FigureVerdict.SAME
    assert verdict_on("step_p50", a, b, effect=0.01).verdict is FigureVerdict.WORSE


@given(st.integers(0, 2**32), st.integers(3, 10), st.floats(0.5, 2.0))
def test_what_is_better_one_way_is_worse_the_other(verdict_on, launches, seed, number, factor):
    noise = random.Random(seed)
    a, b = launches(noise, number), [factor * sample for sample in launches(noise, number)]
    there, back = (verdict_on("step_p50", before, after) for before, after in ((a, b), (b, a)))
    turned = {FigureVerdict.BETTER: FigureVerdict.WORSE, FigureVerdict.WORSE: FigureVerdict.BETTER}
    assert back.verdict is turned.get(there.verdict, there.verdict)
    assert (1 + back.change) * (1 + there.change) == pytest.approx(1)
    assert back.harm == pytest.approx(-there.harm)


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_the_unit_does_not_matter(verdict_on, launches, seed, factor):
    noise = random.Random(seed)
    a, b = launches(noise, 5), launches(noise, 5, center=0.0105)
    one = verdict_on("step_p50", a, b)
    other = verdict_on("step_p50", [factor * sample for sample in a], [factor * sample for sample in b])
    assert one.verdict is other.verdict
    assert one.change == pytest.approx(other.change)


anything = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5)


@given(st.sampled_from(["step_p50", "data_wait", "out_of_memory"]), anything, anything, st.booleans())
@example(metric="data_wait", a=[0.0, 0.0, sys.float_info.max, 0.0, 0.0], b=[0.0, 0.0, -1e292, 0.0, 0.0], turns=True)
def test_whatever_was_measured_there_is_an_answer_in_finite_numbers(verdict_on, metric, a, b, turns):
    change = verdict_on(metric, a, b, turns=turns, value=None)
    assert isinstance(change.verdict, FigureVerdict)
    json.dumps([change.a, change.b, change.change, change.low, change.high, change.harm], allow_nan=False)


def test_the_worst_comes_first(build_run, measured, cell):
    samples = {"step_p50": [1.0] * 3, "throughput": [100.0] * 3, "memory_allocated_peak": [8.0] * 3}
    factors = {"step_p50": 1.2, "throughput": 0.5, "memory_allocated_peak": 0.5}
    a = build_run({}, [measured(cell, name, found) for name, found in samples.items()], cells=[cell])
    b = build_run(
        {},
        [measured(cell, name, [factors[name] * one for one in found]) for name, found in samples.items()],
        cells=[cell],
    )
    changes = compare_runs(a, b).figures
    assert [change.metric for change in changes] == ["throughput", "step_p50", "memory_allocated_peak"]


def test_ranks_are_compared_with_themselves(build_run, measured, cell):
    def run(*peaks):
        figures = [measured(cell, "memory_allocated_peak", [peak] * 3, rank=rank) for rank, peak in enumerate(peaks)]
        return build_run({}, figures, cells=[cell])

    changes = {change.rank: change.verdict for change in compare_runs(run(8.0, 8.0), run(8.0, 16.0)).figures}
    assert changes == {0: FigureVerdict.SAME, 1: FigureVerdict.WORSE}


def test_another_definition_of_the_workload_or_the_metric_is_not_comparable(build_run, measured, cell):
    a = build_run({}, [measured(cell, "step_p50", [1.0] * 3)], cells=[cell])
    for changed, said in (({"workload_key": "other"}, "workload key: k (A), other (B)"), ({"unit": "ms"}, "unit: s")):
        b = build_run({}, [measured(cell, "step_p50", [9.0] * 3, **changed)], cells=[cell])
        (change,) = compare_runs(a, b).figures
        assert change.verdict is FigureVerdict.NOT_COMPARABLE
        assert said in change.reason


def test_runs_that_were_launched_in_turns_are_compared_round_by_round(build_run, measured, cell):
    """A drift of 40 % hides everything unless rounds are paired."""
    drift = [1.0, 1.1, 1.2, 1.3, 1.4]
    sides = [
        [factor * slower * wobble for slower, wobble in zip(drift, wobbles, strict=True)]
        for factor, wobbles in ((1.0, (1, 1.001, 0.999, 1, 1)), (1.1, (1.001, 1, 1, 0.999, 1)))
    ]

    def verdict(**header):
        a, b = (build_run({}, [measured(cell, "step_p50", side)], cells=[cell], **header) for side in sides)
        return compare_runs(a, b).figures[0].verdict

    assert verdict(options={"in_turns": "one"}) is FigureVerdict.WORSE
    assert verdict() is FigureVerdict.INCONCLUSIVE
