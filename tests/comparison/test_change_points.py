"""Changes of a figure's level: found where they are, and rarely elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plumbline.statistics.change_points import Series, change_points

LEAST = math.log1p(0.05)


def series(
    draw: np.random.Generator, levels: list[float], *, drift: float = 0.01, launches: float = 0.01, count: int = 3
) -> Series:
    """Runs at these levels, as logarithms; runs and their launches drift by normal noise of these sizes."""
    runs = [draw.normal(math.log(level) + draw.normal(0, drift), launches, count).tolist() for level in levels]
    return Series(runs, LEAST)


def places(found: list[list]) -> list[list[int]]:
    return [[point.index for point in points] for points in found]


def test_a_level_that_falls_is_found_where_it_fell() -> None:
    draw = np.random.default_rng(0)
    steady, fallen = series(draw, [100.0] * 12), series(draw, [100.0] * 7 + [85.0] * 5)
    found = change_points([steady, fallen])
    assert places(found) == [[], [7]]
    assert found[1][0].difference.mean == pytest.approx(math.log(0.85), abs=0.02)


def test_the_newest_run_alone_is_enough() -> None:
    assert places(change_points([series(np.random.default_rng(1), [100.0] * 9 + [70.0])])) == [[9]]


def test_several_changes_are_found() -> None:
    levels = [100.0] * 6 + [80.0] * 6 + [120.0] * 6
    assert places(change_points([series(np.random.default_rng(2), levels)])) == [[6, 12]]


def test_two_runs_are_compared_by_their_launches() -> None:
    draw = np.random.default_rng(3)
    assert places(change_points([series(draw, [100.0, 70.0], count=5), series(draw, [100.0, 101.0], count=5)])) == [
        [1],
        [],
    ]


def test_a_change_below_the_minimum_effect_is_none() -> None:
    assert places(change_points([series(np.random.default_rng(4), [100.0] * 10 + [97.0] * 10, drift=0.001)])) == [[]]


@pytest.mark.parametrize("runs", [2, 4, 8, 20])
def test_where_nothing_changed_hardly_anything_is_found(runs: int) -> None:
    draw = np.random.default_rng(runs)
    # 60 histories with 5 figures each; the runs drift by 2 %.
    alarms = sum(any(change_points([series(draw, [100.0] * runs, drift=0.02) for _ in range(5)])) for _ in range(60))
    assert alarms <= 6


def test_drift_that_launches_do_not_show_is_no_change() -> None:
    draw = np.random.default_rng(6)
    assert (
        places(change_points([series(draw, [100.0] * 10, drift=0.05, launches=0.0005) for _ in range(5)])) == [[]] * 5
    )


def test_without_launches_that_repeat_the_spread_of_runs_is_the_noise() -> None:
    draw = np.random.default_rng(7)
    assert places(change_points([series(draw, [100.0] * 8 + [80.0] * 8, count=1)])) == [[8]]
    assert places(change_points([Series([[1.0], [2.0]], LEAST), Series([], LEAST), Series([[1.0]], LEAST)])) == [[]] * 3
