"""Error rates of comparisons: false alarms are as rare as promised, and real changes are found."""

from __future__ import annotations

import math
import random

import pytest

from plumbline.report.comparison.figure_changes import (
    FALSE_ALARMS,
    MINIMUM_EFFECT,
    RATIO,
    Decision,
    FigureDifference,
    decide,
)
from plumbline.statistics.intervals import paired_difference, welch_difference

LEAST = RATIO.least(MINIMUM_EFFECT)
SLOWER = math.log(1.10)
LAUNCHES = 5


def steady(noise: random.Random) -> float:
    return noise.gauss(0, 0.02)


def hit_now_and_then(noise: random.Random) -> float:
    return noise.gauss(0, 0.01) + (noise.random() < 0.15) * noise.uniform(0.05, 0.3)


def loud(noise: random.Random) -> float:
    return noise.gauss(0, 0.1)


def table(
    noise, *, method=welch_difference, cells=30, metrics=10, launch=steady, number=LAUNCHES, change=0.0, changed=None
):
    """Return the verdicts on a table whose cells have ``metrics`` figures each, with mostly common noise.

    ``change`` affects the first ``changed`` cells, or all.
    """
    cases = []
    for index in range(cells):
        moved = change if changed is None or index < changed else 0.0
        common = [[launch(noise) for _ in range(number)] for _ in range(2)]
        for _ in range(metrics):
            a, b = ([shared + noise.gauss(0, 0.005) for shared in side] for side in common)
            cases.append(
                FigureDifference(method(a, [sample + moved for sample in b]), LEAST, method is paired_difference)
            )
    return decide(cases)


def alarms(repetitions, **how):
    """Return the share of tables in which anything is said to have changed."""
    noise = random.Random(1)
    return sum(Decision.CHANGED in table(noise, **how) for _ in range(repetitions)) / repetitions


def allowed(repetitions, promised=FALSE_ALARMS):
    """Return a limit that a method which just keeps its promise exceeds once in 700 times (three standard errors)."""
    return promised + 3 * math.sqrt(promised * (1 - promised) / repetitions)


@pytest.mark.parametrize("launch", [steady, hit_now_and_then, loud])
@pytest.mark.parametrize("method", [welch_difference, paired_difference])
def test_three_hundred_figures_of_the_same_thing_raise_no_alarm(method, launch):
    assert alarms(100, method=method, launch=launch) <= allowed(100)


@pytest.mark.parametrize("method", [welch_difference, paired_difference])
def test_one_figure_of_the_same_thing_raises_no_alarm(method):
    assert alarms(2000, method=method, cells=1, metrics=1, launch=loud) <= allowed(2000)


def test_even_the_smallest_least_effect_keeps_the_promise():
    """The least effect makes alarms rarer still, but the promise does not depend on it."""
    noise = random.Random(1)
    found = 0
    for _ in range(200):
        cases = [
            FigureDifference(welch_difference(*([steady(noise) for _ in range(5)] for _ in range(2))), 0.0, False)
            for _ in range(50)
        ]
        found += Decision.CHANGED in decide(cases)
    assert found / 200 <= allowed(200)


def test_a_machine_that_drifts_by_the_least_effect_between_two_runs_raises_no_alarm():
    assert alarms(100, change=LEAST) <= allowed(100)
    assert alarms(1000, cells=1, metrics=1, change=LEAST) <= allowed(1000)


@pytest.mark.parametrize(("method", "number"), [(welch_difference, 7), (paired_difference, 5)])
def test_a_slowdown_of_ten_per_cent_is_found(method, number):
    """With 2 % of noise between launches; run apart, a change must be larger than possible drift."""
    assert alarms(200, method=method, number=number, cells=1, metrics=6, change=SLOWER) >= 0.9


@pytest.mark.parametrize(("method", "number"), [(welch_difference, 12), (paired_difference, 7)])
def test_one_slow_cell_of_thirty_is_found(method, number):
    assert alarms(40, method=method, number=number, change=SLOWER, changed=1) >= 0.9


def test_few_of_those_named_are_named_wrongly():
    """Ten of thirty cells are slower by 10 %; at most 5 % of the reported changes are wrong."""
    noise = random.Random(1)
    wrong = []
    for _ in range(50):
        named = [
            index
            for index, size in enumerate(table(noise, number=10, change=SLOWER, changed=10))
            if size is Decision.CHANGED
        ]
        wrong.append(sum(place >= 100 for place in named) / max(1, len(named)))
        assert len(named) > 80
    assert sum(wrong) / len(wrong) <= FALSE_ALARMS


def test_the_same_is_seldom_said_of_what_changed():
    """At the very edge, where a change is just large enough, in at most 2.5 % of cases."""
    noise = random.Random(1)
    sayings = [size for _ in range(100) for size in table(noise, cells=30, metrics=1, change=LEAST)]
    assert sayings.count(Decision.SAME) / len(sayings) <= allowed(len(sayings), 0.025)


def test_the_same_thing_is_said_to_be_the_same():
    noise = random.Random(1)
    sayings = [size for _ in range(20) for size in table(noise, number=7)]
    assert sayings.count(Decision.SAME) / len(sayings) >= 0.9


def test_noise_that_hides_a_change_is_no_sameness():
    noise = random.Random(1)
    sayings = [size for _ in range(20) for size in table(noise, launch=lambda noise: noise.gauss(0, 0.2), number=5)]
    assert sayings.count(Decision.SAME) / len(sayings) < 0.01


def test_what_is_lost_among_many_is_said_to_be():
    noise = random.Random(1)
    one = welch_difference([steady(noise) for _ in range(5)], [math.log(1.13) + steady(noise) for _ in range(5)])
    others = [welch_difference(*([steady(noise) for _ in range(5)] for _ in range(2))) for _ in range(299)]
    assert decide([FigureDifference(one, LEAST, False)]) == [Decision.CHANGED]
    assert decide([FigureDifference(estimate, LEAST, False) for estimate in (one, *others)])[0] is Decision.CHANCE


def test_drift_in_both_sides_needs_no_allowance():
    a = [0.0, 0.1, 0.2, 0.3, 0.4]
    estimate = paired_difference(
        a, [sample + shift for sample, shift in zip(a, (0.06, 0.04, 0.07, 0.05, 0.06), strict=True)]
    )
    assert decide([FigureDifference(estimate, LEAST, True)]) == [Decision.CHANGED]
    assert decide([FigureDifference(estimate, LEAST, False)]) == [Decision.UNCLEAR]


def test_nothing_to_say_of_nothing():
    assert decide([]) == []


def test_so_many_launches_as_are_said_to_be_enough_are():
    """Approximately, because eight launches do not know their own noise well."""
    noise = random.Random(1)
    told = []
    for _ in range(50):
        few = FigureDifference(
            welch_difference(*([noise.gauss(0, 0.08) for _ in range(8)] for _ in range(2))), LEAST, False
        )
        many = few.enough(8)
        told.append(
            FigureDifference(
                welch_difference(*([noise.gauss(0, 0.08) for _ in range(many)] for _ in range(2))), LEAST, False
            ).is_within
        )
    assert sum(told) / len(told) > 0.5


@pytest.mark.parametrize("far", [1e30, 1e152])
def test_no_number_of_launches_is_asked_for_that_nobody_would_make(far):
    assert FigureDifference(welch_difference([0.0, 0.0, 0.0], [0.0, 0.0, far]), LEAST, False).enough(3) is None
