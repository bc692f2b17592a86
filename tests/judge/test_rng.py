"""Random numbers that are not random are found and named; fair coins never are."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks.rng import rng
from plumbline.judge.findings import Vacuous
from plumbline.judge.oracle.dropout_masks import shifted_agreements, surprise, surprise_limit
from plumbline.judge.oracle.noise import FALSE_ALARM
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS

LAYERS = ("coins 1", "coins 2")
WORKLOAD = WORKLOADS["random-masks"]


class At(NamedTuple):
    """A layer's place in a training, and its number of samples."""

    rank: int
    step: int
    micro_batch: int
    device: int
    layer: int
    samples: int


def coins(seed, samples, units=64, kept=0.5):
    """Return rows of coin tosses, as the layer records them."""
    return 2.0 * (torch.rand(samples, units, generator=torch.Generator().manual_seed(seed)) < kept)


def independent(at, **options):
    """Return rows that are independent of those at any other place."""
    return coins(hash(at), at.samples, **options)


def trace_of(rows, *, ranks, steps=6, micro_batches=1, devices=1, samples=4):
    """Return the evidence of ranks whose masks are ``rows(at)``."""

    def micro(rank, step, number):
        drawn = {
            layer: torch.cat([rows(At(rank, step, number, device, index, samples)) for device in range(devices)])
            for index, layer in enumerate(LAYERS)
        }
        return MicroBatch((tuple(range(samples)),) * devices, None, drawn)

    def taken(rank, step):
        return Step(tuple(micro(rank, step, number) for number in range(micro_batches)), {}, {}, {}, ())

    return Trace(
        tuple(RankTrace(rank, ranks, tuple(taken(rank, step) for step in range(steps))) for rank in range(ranks))
    )


@pytest.fixture
def asked(cell_of):
    def ask(rows, backend="ddp", topology="1x3", **options):
        cell = cell_of("random-masks", backend, topology)
        return rng(TraceAnalysis(trace_of(rows, ranks=cell.processes, **options), WORKLOAD, cell))

    return ask


@pytest.mark.parametrize(("backend", "topology"), [("none", "1x1"), ("ddp", "1x3"), ("ddp", "2x2")])
def test_fair_coins_are_never_accused(asked, backend, topology):
    for seed in range(20):
        finding = asked(lambda at, seed=seed: coins(hash((seed, at)), at.samples), backend, topology)
        assert finding.outcome is Outcome.PASSED, (seed, finding)


def test_devices_and_micro_batches_of_their_own_are_never_accused(asked):
    finding = asked(independent, "dp", "1x3", devices=3, micro_batches=2)
    assert finding.outcome is Outcome.PASSED


MISTAKES = {
    "one-seed-on-all-ranks": lambda at: independent(at._replace(rank=0)),
    "one-state-on-all-ranks": lambda at: independent(at if at.step < 3 else at._replace(rank=0)),
    "some-ranks-seeded-alike": lambda at: independent(at._replace(rank=min(at.rank, 1))),
    "seeded-anew-every-step": lambda at: independent(at._replace(step=0)),
    "seeded-anew-every-epoch": lambda at: independent(at._replace(step=at.step % 3)),
    "seeded-anew-every-micro-batch": lambda at: independent(at._replace(micro_batch=0)),
    "replicas-draw-alike": lambda at: independent(at._replace(device=0)),
    "layers-drop-alike": lambda at: independent(at._replace(layer=0)),
    "one-mask-for-several-samples": lambda at: independent(at)[:1].expand(at.samples, -1),
    "a-rank-lags": lambda at: independent(at._replace(rank=0, step=at.rank + at.step)),
    "never-drops": lambda at: torch.ones(at.samples, 64),
    "drops-everything": lambda at: torch.zeros(at.samples, 64),
    "drops-another-share": lambda at: independent(at, kept=0.6),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_what_was_drawn_alike_is_seen_and_named(asked, cause):
    finding = asked(MISTAKES[cause], micro_batches=2, devices=2)
    assert finding.outcome is Outcome.FAILED
    assert (finding.cause, finding.family) == (cause, "rng"), finding


@pytest.mark.parametrize(("cause", "seed"), [("seeded-by-local-rank", lambda r: r % 2),
                                             ("seeded-by-node", lambda r: r // 2)])  # fmt: skip
def test_ranks_of_several_nodes_are_told_apart(asked, cause, seed):
    finding = asked(lambda at: independent(at._replace(rank=seed(at.rank))), "ddp", "2x2")
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, cause)


@pytest.mark.parametrize("lag", [1, 7, 64 * 8 + 3])
def test_one_stream_some_tosses_later_is_seen(asked, lag):
    stream = coins(5, 1, units=10_000)[0]

    def later(at):
        start = at.rank * lag + (at.step * len(LAYERS) + at.layer) * at.samples * 64
        return stream[start : start + at.samples * 64].reshape(at.samples, 64)

    finding = asked(later)
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "a-rank-lags")
    assert f" {lag} bits" in finding.message


def test_masks_that_are_the_opposite_of_one_another_are_seen(asked):
    def opposite(at):
        own = independent(at._replace(rank=0))
        return 2 - own if at.rank else own

    assert asked(opposite).outcome is Outcome.FAILED


def test_a_layer_that_drew_nothing_is_missed(asked, cell_of):
    cell = cell_of("random-masks", "ddp", "1x2")
    trace = trace_of(independent, ranks=2)
    trace.ranks[1].steps[2].micro_batches[0].drawn.clear()
    finding = rng(TraceAnalysis(trace, WORKLOAD, cell))
    assert (finding.cause, finding.step, finding.rank) == ("nothing-drawn", 2, 1)


def test_other_masks_in_the_backward_are_seen(cell_of):
    trace = trace_of(independent, ranks=1)
    drawn = trace.ranks[0].steps[4].micro_batches[0].drawn
    drawn["coins 2 again"] = coins(99, 4)
    finding = rng(TraceAnalysis(trace, WORKLOAD, cell_of("random-masks", "none", "1x1")))
    assert (finding.cause, finding.step) == ("masks-drawn-anew-in-the-backward", 4)


def test_the_question_does_not_arise_where_nothing_is_drawn(cell_of):
    assert rng(TraceAnalysis(Trace(()), WORKLOADS["mlp"], cell_of("mlp", "none", "1x1"))) is None


def test_too_few_coins_say_nothing(asked):
    with pytest.raises(Vacuous, match="too few"):
        asked(lambda at: independent(at, units=16))


@pytest.mark.parametrize("tosses", [8, 20, 64, 200])
def test_surprise_is_never_more_than_the_chance_allows(tosses):
    """It is a bound: the true probability of a count at least as uneven is never above exp(-surprise)."""
    for count in range((tosses + 1) // 2, tosses + 1):
        chance = sum(math.comb(tosses, k) for k in range(count, tosses + 1)) / 2**tosses
        bound = math.exp(-float(surprise(torch.tensor(float(count)), torch.tensor(float(tosses)))))
        assert chance <= bound * (1 + 1e-5)
    assert bound == pytest.approx(2.0**-tosses, rel=1e-4), "exact where all are alike"


def test_the_limit_divides_one_chance_among_all_questions():
    for questions in (1, 1000):
        assert 2 * questions * math.exp(-surprise_limit(questions)) == pytest.approx(FALSE_ALARM)


def test_agreements_at_every_lag_are_those_that_one_counts():
    left, right = coins(1, 1, 13)[0] > 0, coins(2, 1, 8)[0] > 0
    common, places, lags = shifted_agreements(left, right)
    for lag, found, of in zip(lags.tolist(), common.tolist(), places.tolist(), strict=True):
        beside = [(left[i + lag], right[i]) for i in range(8) if 0 <= i + lag < 13]
        assert (found, of) == (sum(bool(a == b) for a, b in beside), len(beside))
