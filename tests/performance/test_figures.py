"""Figures depend only on the ranks' clocks and counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.benchmark.launch_metrics import METRICS, SamplesError, samples_of, step_quantiles
from plumbline.benchmark.timed_launch import LaunchSample, LaunchTimings
from plumbline.evidence.timing import RankTiming, Round


def round_of(begun, steps, samples, wait=0.0):
    """Return a round with these seconds per step, and these seconds of waiting for data in each."""
    ended, forwards, now = [], [], begun
    for step in steps:
        forwards.append(now + wait)
        now += step
        ended.append(now)
    return Round(begun, tuple(forwards), tuple(ended), tuple(samples))


def rank_of(rank, *rounds, **looked):
    return RankTiming(rank, warmup=round_of(0.0, [0.5], []), rounds=rounds, **looked)


def launch_of(*ranks, yardstick=None):
    return LaunchSample(LaunchTimings(ranks, 1.0), yardstick)


def figures(*launches, devices=1):
    return {key: values[0] if len(values) == 1 else values for key, values in samples_of(launches, devices).items()}


def test_throughput_is_all_samples_over_all_time_and_no_mean_of_rates():
    fast, slow = round_of(10.0, [0.1], range(10)), round_of(20.0, [0.9], range(10))
    found = figures(launch_of(rank_of(0, fast, slow)))
    assert found["throughput", None] == pytest.approx(20 / 1.0)
    assert found["throughput", None] != pytest.approx((10 / 0.1 + 10 / 0.9) / 2)


def test_the_slowest_rank_is_the_time_of_all():
    quick, late = round_of(10.0, [0.1], range(5)), round_of(10.0, [0.4], range(5, 10))
    found = figures(launch_of(rank_of(0, quick), rank_of(1, late)), devices=2)
    assert found["throughput", None] == pytest.approx(10 / 0.4)
    assert found["throughput_per_gpu", None] == pytest.approx(10 / 0.4 / 2)


def test_samples_that_were_not_consumed_do_not_count():
    found = figures(launch_of(rank_of(0, round_of(0.0, [1.0], range(3)))))
    assert found["throughput", None] == pytest.approx(3)


def test_ranks_that_train_on_the_same_samples_have_no_throughput():
    same = round_of(0.0, [1.0], range(8))
    with pytest.raises(SamplesError, match=r"16 samples .* only 8 of them are distinct"):
        samples_of([launch_of(rank_of(0, same), rank_of(1, same))], 2)


def test_what_never_goes_through_the_jobs_model_has_no_throughput():
    with pytest.raises(SamplesError, match="no samples passed through"):
        samples_of([launch_of(rank_of(0, round_of(0.0, [1.0], [])))], 1)


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=20), st.floats(0, 1e6))
def test_the_steps_of_a_round_are_its_time(steps, begun):
    found = launch_of(rank_of(0, round_of(begun, steps, range(4))))
    quantiles = step_quantiles([found])
    assert quantiles == tuple(sorted(quantiles))
    assert quantiles[0] == pytest.approx(min(steps), abs=1e-6)
    assert quantiles[-1] == pytest.approx(max(steps), abs=1e-6)
    assert figures(found)["throughput", None] == pytest.approx(4 / sum(steps), rel=1e-3)


def test_a_step_is_over_when_the_last_rank_has_done_it():
    one, other = round_of(0.0, [0.1, 0.3], range(2)), round_of(0.0, [0.3, 0.1], range(2, 4))
    found = figures(launch_of(rank_of(0, one), rank_of(1, other)), devices=2)
    assert found["step_p50", None] == pytest.approx((0.3 + 0.1) / 2)
    assert found["rank_skew", None] == pytest.approx(((0.3 - 0.1) + 0.0) / 2 / 0.2)


def test_the_first_step_is_that_of_the_warm_up():
    assert figures(launch_of(rank_of(0, round_of(9.0, [0.1], [0]))))["step_first", None] == pytest.approx(0.5)


def test_waiting_for_data_is_a_share_of_the_step():
    waits = round_of(0.0, [0.4, 0.4], range(2), wait=0.1)
    assert figures(launch_of(rank_of(0, waits)))["data_wait", None] == pytest.approx(0.25)


def test_overhead_compares_neighbours():
    # The machine becomes ten times slower meanwhile, for both.
    mine = [round_of(0.0, [1.1], [0]), round_of(5.0, [11.0], [1])]
    by_hand = [round_of(2.0, [1.0], [0]), round_of(20.0, [10.0], [1])]
    found = figures(launch_of(rank_of(0, *mine), yardstick=LaunchTimings((rank_of(0, *by_hand),), 1.0)))
    assert found["overhead", None] == pytest.approx(1.1)


def test_what_was_not_measured_is_not_there():
    found = figures(launch_of(rank_of(0, round_of(0.0, [1.0], [0]))))
    for metric in ("overhead", "rank_skew", "communication", "memory_private_peak", "tensors_parameters"):
        assert not [key for key in found if key[0] == metric], metric


def test_communication_that_one_rank_did_not_see_is_not_told():
    seen = rank_of(0, round_of(0.0, [1.0], [0]), communication=0.5)
    unseen = rank_of(1, round_of(0.0, [1.0], [1]))
    assert ("communication", None) not in figures(launch_of(seen, unseen), devices=2)
    both = rank_of(1, round_of(0.0, [1.0], [1]), communication=0.7)
    assert figures(launch_of(seen, both), devices=2)["communication", None] == pytest.approx(0.6)


def test_memory_stands_for_each_rank():
    ranks = [rank_of(n, round_of(0.0, [1.0], [n]), memory={"memory_private_peak": 10 + n}) for n in range(2)]
    found = figures(launch_of(*ranks), devices=2)
    assert (found["memory_private_peak", 0], found["memory_private_peak", 1]) == (10, 11)


def test_every_figure_has_a_unit():
    looked = {"memory": {"memory_private_peak": 1}, "tensors": {"tensors_gradients": 1}, "communication": 0.1}
    ranks = [rank_of(n, round_of(0.0, [1.0], [n]), **looked) for n in range(2)]
    found = figures(launch_of(*ranks, yardstick=LaunchTimings(tuple(ranks), 1.0)), devices=2)
    assert {metric for metric, _ in found} <= METRICS.keys()


def test_samples_that_the_stages_of_a_pipeline_share_count_once():
    whole, none = round_of(0.0, [1.0], range(8)), round_of(0.0, [1.0], [])
    other = round_of(0.0, [1.0], range(8, 16))
    ranks = [rank_of(0, whole), rank_of(1, none), rank_of(2, other), rank_of(3, other)]
    found = samples_of([launch_of(*ranks)], 4, replicas=[[0, 1], [2, 3]])
    assert found["throughput", None] == [pytest.approx(16)]
