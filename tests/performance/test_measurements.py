"""Measurements of launches become records of the run: with bounds, refusals, and results over several cells."""

from __future__ import annotations

import math

import pytest

from plumbline.benchmark.measurements import measurements, scaling
from plumbline.benchmark.timed_launch import LaunchSample, LaunchTimings
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.evidence.timing import RankTiming, Round
from plumbline.results.records import Measurement
from plumbline.results.run import line_of, record_of


def cell(devices=1, workload="perf-mlp", precision="32"):
    backend = "none" if devices == 1 else "ddp"
    return Cell("mine", workload, backend, Topology(1, devices), precision, "cpu")


def launches(*seconds, devices=1, samples=10, memory=None):
    """Return launches with one round of two steps that took these seconds each."""
    return [
        LaunchSample(
            LaunchTimings(
                tuple(
                    RankTiming(
                        rank,
                        Round(0.0, (0.0,), (0.5,), ()),
                        (
                            Round(
                                0.0, (0.0, one / 2), (one / 2, one), tuple(range(rank * samples, (rank + 1) * samples))
                            ),
                        ),
                        memory or {},
                    )
                    for rank in range(devices)
                ),
                one,
            )
        )
        for one in seconds
    ]


def figure(records, metric, rank=None):
    (found,) = [one for one in records if (one.metric, one.rank) == (metric, rank)]
    return found


def test_a_figure_has_its_launches_its_bounds_and_what_repeats_it():
    found = figure(measurements(cell(), launches(1.0, 1.1, 1.05), "pytest that"), "throughput")
    assert found.samples == pytest.approx((10 / 1.0, 10 / 1.1, 10 / 1.05))
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(10 / 1.05)
    assert (found.unit, found.better, found.reproduce) == ("samples/s", "higher", "pytest that")
    assert found.workload_key


def test_what_is_unstable_has_no_value_and_keeps_what_was_seen():
    found = figure(measurements(cell(), launches(1.0, 2.0, 4.0), ""), "throughput")
    assert found.value is None
    assert "unstable" in found.refusal
    assert len(found.samples) == 3
    assert found.high / found.low > 2


def test_single_steps_are_there_as_quantiles():
    found = figure(measurements(cell(), launches(1.0, 1.1, 1.05), ""), "step_p50")
    assert len(found.quantiles) == 41
    assert found.quantiles[0] == pytest.approx(0.5)
    assert found.quantiles[-1] == pytest.approx(0.55)


def test_one_retry_of_the_allocator_is_not_averaged_away():
    some = [launch for n in (0, 1, 0) for launch in launches(1.0, memory={"allocator_retries": n})]
    found = figure(measurements(cell(), some, ""), "allocator_retries", rank=0)
    assert (found.value, found.refusal, found.unit) == (1, None, "count")


def test_records_arrive_as_they_were_sent():
    for record in measurements(cell(2), launches(1.0, 1.1, 1.05, devices=2), "pytest"):
        assert record_of(line_of(record)) == record


def test_scaling_is_what_is_left_of_each_device():
    single = measurements(cell(), launches(1.0, 1.02, 0.98), "")
    # Twice the samples in 1.25 times the time: 0.8 of each device is left.
    double = measurements(cell(2), launches(1.25, 1.26, 1.24, devices=2), "")
    (found,) = scaling([*single, *double])
    assert (found.metric, found.gpus, found.unit) == ("scaling_weak", 2, "ratio")
    assert found.value == pytest.approx(2 * 10 / 1.25 / (10 / 1.0) / 2)
    throughput = figure(double, "throughput")
    assert math.log(found.high / found.low) > math.log(throughput.high / throughput.low), "both figures' doubt is in it"
    assert found.low < 0.8 < found.high


def test_strong_scaling_has_its_own_name():
    both = [
        *measurements(cell(workload="perf-resnet-strong"), launches(1.0, 1.0, 1.0), ""),
        *measurements(cell(2, "perf-resnet-strong"), launches(0.5, 0.5, 0.5, devices=2, samples=5), ""),
    ]
    (found,) = scaling(both)
    assert found.metric == "scaling_strong"
    assert found.value == pytest.approx(1.0)


def test_nothing_scales_from_what_is_not_known():
    double = measurements(cell(2), launches(1.0, 1.0, 1.0, devices=2), "")
    assert scaling(double) == []
    unstable = measurements(cell(), launches(1.0, 2.0, 4.0), "")
    assert scaling([*unstable, *double]) == []
    other = measurements(cell(precision="bf16"), launches(1.0, 1.0, 1.0), "")
    assert scaling([*other, *double]) == []
    assert all(isinstance(one, Measurement) for one in double)
