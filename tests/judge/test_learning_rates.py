"""A rate is a float64 number in every precision: its error is a multiple of that rounding, not of float16's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.core.outcome import Outcome
from harness.workloads import WORKLOADS

PLAIN = WORKLOADS["mlp"]


@pytest.fixture(scope="module")
def judged(simulation):
    """Return a function that judges a float16 training whose rates at one step were times a number."""

    def judged(factor, cell):
        trace = simulation.right_trace(PLAIN, cell)
        (rank,) = trace.ranks
        step = rank.steps[1]
        wrong = replace(step, learning_rates=tuple(rate * factor for rate in step.learning_rates))
        steps = (rank.steps[0], wrong, *rank.steps[2:])
        return simulation.judge(replace(trace, ranks=(replace(rank, steps=steps),)), PLAIN, cell)["learning-rate"]

    return judged


@pytest.mark.parametrize(("factor", "errors"), [(1.01, 0.01), (2.0, 1.0)])
def test_an_error_of_a_rate_is_measured_in_its_own_rounding(judged, cell_of, factor, errors):
    found = judged(factor, cell_of("mlp", "none", "1x1", "16"))
    assert found.outcome is Outcome.FAILED
    assert found.error_x_noise / found.limit_x_noise == pytest.approx(errors * 1e12)


def test_a_rate_that_is_no_number_is_wrong(judged, cell_of):
    found = judged(math.nan, cell_of("mlp", "none", "1x1", "16"))
    assert (found.outcome, found.error_x_noise) == (Outcome.FAILED, math.inf)


def test_a_rate_that_went_through_a_few_roundings_is_right(judged, cell_of):
    assert judged(1 + 1e-15, cell_of("mlp", "none", "1x1", "16")).outcome is Outcome.PASSED
