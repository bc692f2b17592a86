"""Ranks are timed correctly and wait for each other; however they end, there is a result and nothing is left."""

from __future__ import annotations

import json
from itertools import pairwise

import psutil
import pytest

from plumbline.benchmark.launch_metrics import SamplesError, samples_of
from plumbline.benchmark.timed_launch import LaunchSample, TimedLaunchError, interleaved
from plumbline.core.outcome import Outcome
from plumbline.workloads import PERFORMANCE

SHARED = ("1x1", "1x2")


@pytest.mark.parametrize("topology", SHARED)
def test_the_stopwatch_agrees_with_a_trainers_own_clock(timed, notes, topology):
    told = timed("keeps-time", topology)
    for rank in told.ranks:
        noted = json.loads((notes / f"rank-{rank.rank}.json").read_text())
        rounds = [rank.warmup, *rank.rounds]
        ended = [moment for one in rounds for moment in one.ended]
        forwards = [moment for one in rounds for moment in one.forwards]
        # Both use the machine's clock: the order of the stamps needs no tolerance.
        for (begun, before, after), forward, end in zip(noted, forwards, ended, strict=False):
            assert begun <= forward <= before <= end <= after
        for one in rank.rounds:
            assert one.begun <= one.forwards[0]
            assert one.seconds == pytest.approx(sum(b - a for a, b in pairwise([one.begun, *one.ended])))


@pytest.mark.parametrize("topology", SHARED)
def test_every_sample_is_counted_once_where_it_was_used(timed, topology):
    told = timed("plain", topology)
    workload = PERFORMANCE["perf-mlp"]
    devices = len(told.ranks)
    extent = workload.extent(devices)
    for number in range(extent.rounds):
        samples = [sample for rank in told.ranks for sample in rank.rounds[number].samples]
        assert len(samples) == len(set(samples)) == extent.steps * workload.global_batch_size(devices)
    assert all(one.steps == extent.steps for rank in told.ranks for one in rank.rounds)
    assert told.ranks[0].warmup.steps == extent.warmup


def test_no_rank_begins_a_round_before_all_have_ended_the_last(timed):
    told = timed("plain", "1x3")
    for before, after in pairwise(range(4)):
        assert max(rank.rounds[before].ended[-1] for rank in told.ranks) <= min(
            rank.rounds[after].begun for rank in told.ranks
        )


def test_groups_that_take_turns_never_train_at_the_same_time(begun, warm_pool):
    groups = [begun("plain", "1x2"), begun("torch", "1x2", pool=warm_pool("torch"))]
    interleaved(groups, 4)
    one, other = (group.end() for group in groups)
    spans = [
        (
            min(rank.rounds[number].begun for rank in told.ranks),
            max(rank.rounds[number].ended[-1] for rank in told.ranks),
        )
        for told in (one, other)
        for number in range(4)
    ]
    for (_, ended), (begun_, _) in pairwise(sorted(spans)):
        assert ended <= begun_


@pytest.mark.parametrize("topology", SHARED)
@pytest.mark.parametrize(
    ("subject", "outcome", "said"),
    [
        ("raises", Outcome.ERRORED, "RuntimeError: the fortieth batch is broken"),
        ("dies", Outcome.CRASHED, "signal 9"),
    ],
)
def test_a_rank_that_ends_badly_is_named(timed, subject, outcome, said, topology):
    with pytest.raises(TimedLaunchError) as failed:
        timed(subject, topology)
    finding = failed.value.finding
    assert (finding.check, finding.outcome) == ("performance", outcome)
    assert finding.rank == int(topology[-1]) - 1
    assert said in finding.message
    assert (failed.value.folder / "rank-0.log").is_file(), "what it said is kept for whoever wants to know"


@pytest.mark.parametrize("topology", SHARED)
def test_a_rank_that_hangs_is_ended(timed, topology):
    with pytest.raises(TimedLaunchError) as failed:
        timed("hangs", topology, time_limit=5)
    finding = failed.value.finding
    assert finding.outcome is Outcome.TIMED_OUT
    assert "5 s" in finding.message


@pytest.mark.parametrize("topology", SHARED)
@pytest.mark.parametrize("subject", ["stops-early", "goes-on"])
def test_a_trainer_that_does_not_step_once_a_batch_has_no_figures(timed, subject, topology):
    with pytest.raises(TimedLaunchError) as failed:
        timed(subject, topology)
    assert failed.value.finding.outcome is Outcome.ERRORED
    assert "one step per batch" in failed.value.finding.message


def test_ranks_that_never_meet_are_no_group(timed):
    with pytest.raises(TimedLaunchError) as failed:
        timed("alone", "1x2")
    assert failed.value.finding.outcome is Outcome.FAILED
    assert "in a world of 1 instead of 2" in failed.value.finding.message


def test_samples_that_all_ranks_use_are_not_counted_for_each(timed):
    told = timed("repeats", "1x2")
    with pytest.raises(SamplesError):
        samples_of([LaunchSample(told)], 2)


def test_the_pool_goes_on_after_a_group_that_failed(timed):
    for subject in ("raises", "dies", "stops-early"):
        with pytest.raises(TimedLaunchError):
            timed(subject, "1x2")
    assert len(timed("plain", "1x2").ranks) == 2


def processes():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_group_that_nobody_wants_any_more_leaves_nothing(begun, trainers):
    assert trainers.subjects
    before = processes()
    group = begun("plain", "1x2")
    group.round()
    assert processes() > before
    group.close()
    assert processes() == before
    assert not group.folder.exists()


def test_a_step_that_the_scaler_skips_is_a_step(timed):
    told = timed("overflows", "1x1", "perf-gpt", "16")
    extent = PERFORMANCE["perf-gpt"].extent(1)
    assert [one.steps for one in told.ranks[0].rounds] == [extent.steps] * extent.rounds
