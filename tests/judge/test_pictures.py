"""The judge's data for pictures: errors over steps and parameters, and which ranks' gradients were combined."""

from __future__ import annotations

import math

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import MOST_PARAMETERS, MOST_STEPS, STEPS_BEFORE, with_error_grid
from plumbline.judge.oracle.noise import TOGETHER, Deviation

FAILED = Finding("gradients", Outcome.FAILED, "wrong", step=50)


def test_a_grid_has_the_largest_error_over_ranks():
    errors = [
        Deviation(1.234, 0, "a", 0),
        Deviation(7.0, 0, "a", 1),
        Deviation(math.nan, 1, "b", 0),
        Deviation(9e9, 0, TOGETHER, 0),
    ]
    grid = with_error_grid(FAILED, errors).error_grid
    assert grid is not None
    assert (grid.parameters, grid.steps) == (("a", "b"), (0, 1))
    assert grid.errors == ((7.0, None), (None, math.inf))
    assert with_error_grid(FAILED, []).error_grid is None


@pytest.mark.parametrize(("steps", "first"), [(10, 0), (100, 50 - STEPS_BEFORE), (51, 51 - MOST_STEPS)])
def test_a_grid_is_bounded_and_holds_the_step_of_the_finding(steps, first):
    errors = [Deviation(1.0, step, f"layers.{n}.weight", 0) for step in range(steps) for n in range(30)]
    errors.append(Deviation(99.0, min(50, steps - 1), "head", 0))
    grid = with_error_grid(FAILED, errors).error_grid
    assert grid is not None
    assert len(grid.parameters) <= MOST_PARAMETERS
    assert {"layers", "head"} == set(grid.parameters), "modules, where parameters are too many"
    assert grid.steps == tuple(range(first, first + min(steps, MOST_STEPS)))
    assert 99.0 in grid.errors[-1]


def test_of_many_modules_the_worst_stay():
    errors = [Deviation(float(n), 0, f"w{n}", 0) for n in range(MOST_PARAMETERS + 5)]
    grid = with_error_grid(FAILED, errors).error_grid
    assert grid is not None
    assert grid.parameters == tuple(f"w{n}" for n in range(5, MOST_PARAMETERS + 5))
