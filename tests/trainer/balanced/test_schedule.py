"""Simulated schedules compared with formulas, and with the rules of every schedule."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.trainer.balanced.stage_plan import BACKWARD, FORWARD, simulate

times = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 1), (2, 8), (4, 3), (4, 8), (8, 16)])
def test_equal_stages_take_as_long_as_the_formula_says(stages, micro_batches):
    schedule = simulate([1.0] * stages, [2.0] * stages, micro_batches)
    # Narayanan et al. 2021: (m + k - 1)(F + B), a bubble of k - 1 in m + k - 1.
    assert schedule.makespan == 3 * (micro_batches + stages - 1)
    assert schedule.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)


@given(times, st.integers(1, 9))
def test_every_rule_is_kept(stage_times, micro_batches):
    forward, backward = zip(*stage_times, strict=True)
    stages = len(forward)
    schedule = simulate(forward, backward, micro_batches)
    at = {(box.kind, box.stage, box.micro_batch): box for box in schedule.boxes}
    assert len(at) == len(schedule.boxes) == 2 * stages * micro_batches
    for (kind, stage, index), box in at.items():
        assert box.end - box.start == (forward[stage] if kind == FORWARD else backward[stage])
        if kind == FORWARD:
            assert stage == 0 or box.start >= at[FORWARD, stage - 1, index].end
        else:
            needs = (FORWARD, stage, index) if stage == stages - 1 else (BACKWARD, stage + 1, index)
            assert box.start >= at[needs].end
    for stage in range(stages):
        own = sorted((box for box in schedule.boxes if box.stage == stage), key=lambda box: box.start)
        assert all(one.end <= other.start for one, other in pairwise(own))
        # Bounds for any schedule: a stage's own work, and a micro-batch's forward and backward.
        there_and_back = sum(forward[:stage]) + sum(backward[:stage])
        assert schedule.makespan >= there_and_back + micro_batches * (forward[stage] + backward[stage])
    assert schedule.makespan >= sum(forward) + sum(backward)
    busy = micro_batches * (sum(forward) + sum(backward))
    assert schedule.bubble_share == pytest.approx(1 - busy / (stages * schedule.makespan))


@given(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_a_stage_that_ends_early_steps_while_the_others_still_compute(micro_batches, after):
    stages = len(after)
    schedule = simulate([1.0] * stages, [2.0] * stages, micro_batches)
    # Stage s starts s forwards late, and ends s backwards early.
    assert schedule.period(after) == max(schedule.makespan - 3 * stage + more for stage, more in enumerate(after))


@given(times, st.integers(1, 9))
def test_1f1b_keeps_only_what_the_later_stages_have_not_returned(stage_times, micro_batches):
    forward, backward = zip(*stage_times, strict=True)
    stages = len(forward)
    schedule = simulate(forward, backward, micro_batches)
    for stage in range(stages):
        own = sorted((box for box in schedule.boxes if box.stage == stage), key=lambda box: box.start)
        in_flight = list(accumulate(1 if box.kind == FORWARD else -1 for box in own))
        assert max(in_flight) == min(stages - stage, micro_batches)


def test_one_slow_stage_sets_the_pace():
    schedule = simulate([1.0, 4.0, 1.0], [1.0, 4.0, 1.0], 10)
    # The forwards before it, its work, and the backwards after it: the next stage works at the same time.
    assert schedule.makespan == 1 + 10 * 8 + 1
