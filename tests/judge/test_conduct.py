"""A subject's declarations change what is right: iterations, order, buffers. Traces are made without processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks.buffers import buffers
from plumbline.judge.checks.samples import samples
from plumbline.judge.oracle.layout import contract_layout, draws, with_unique_draws
from plumbline.judge.oracle.layout import samples as samples_of
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS

MLP = WORKLOADS["mlp"]
ITERATIONS, OWN_BUFFERS = TrainingBehavior(data="iterations"), TrainingBehavior(buffers="per-rank")
GROUP = 24  # samples per step, over all ranks


def trace_of(ranks):
    """Return ranks whose steps drew these samples, one batch each; weights do not matter."""
    return Trace(
        tuple(
            RankTrace(rank, len(ranks), tuple(Step((MicroBatch((ids,), ids),), {}, {}, {}, (0.1,)) for ids in own))
            for rank, own in enumerate(ranks)
        )
    )


@pytest.fixture
def asked(cell_of):
    """Return the samples check's finding on each rank's draws."""

    def ask(ranks, behavior=ITERATIONS, workload=MLP):
        cell = cell_of("mlp", "ddp", f"1x{len(ranks)}")
        return samples(TraceAnalysis(trace_of(ranks), workload, cell, behavior))

    return ask


def drawn(world, seed, pick):
    """Return six steps' draws for each rank, from its own generator; ``pick`` draws samples out of 72."""
    generators = [random.Random(1000 * seed + rank) for rank in range(world)]
    return [[pick(generator, GROUP // world) for _ in range(6)] for generator in generators]


def with_replacement(generator, count):
    return tuple(generator.randrange(72) for _ in range(count))


def without_replacement(generator, count):
    return tuple(generator.sample(range(72), count))


def of_unequal_weight_and_sorted(generator, count):
    return tuple(sorted(generator.choices(range(72), [(i + 1) ** 2 for i in range(72)], k=count)))


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("pick", [with_replacement, without_replacement, of_unequal_weight_and_sorted])
def test_ranks_that_draw_by_themselves_are_never_accused(asked, pick, world):
    for seed in range(60):
        finding = asked(drawn(world, seed, pick))
        assert finding.outcome is Outcome.PASSED, (seed, finding.message)
    assert "epochs are not judged" in finding.message


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_that_draw_the_same_are_caught(asked, world):
    alike = drawn(world, 0, with_replacement)
    alike[-1] = alike[0]
    finding = asked(alike)
    assert (finding.outcome, finding.cause, finding.rank) == (Outcome.FAILED, "ranks-alike", world - 1)


def test_ranks_that_draw_the_same_in_one_step_are_caught_there(asked):
    alike = drawn(2, 0, with_replacement)
    alike[1][4] = alike[0][4]
    finding = asked(alike)
    assert (finding.cause, finding.step) == ("ranks-alike", 4)


def test_half_a_batch_in_common_in_every_step_is_caught(asked):
    alike = drawn(2, 0, with_replacement)
    alike[1] = [(*own[:6], *other[6:]) for own, other in zip(*alike, strict=True)]
    assert asked(alike).cause == "ranks-alike"


def test_a_rank_that_draws_its_batch_again_is_caught(asked):
    stuck = drawn(3, 0, with_replacement)
    stuck[1][3] = stuck[1][2]
    finding = asked(stuck)
    assert (finding.cause, finding.step, finding.rank) == ("batch-again", 3, 1)


def test_by_iterations_no_window_is_short(asked):
    short = drawn(2, 0, with_replacement)
    short[1][5] = short[1][5][:-1]
    finding = asked(short)
    assert finding.outcome is Outcome.FAILED
    assert "step 5 consumed 23 samples, not 24" in finding.message


def test_undeclared_draws_with_replacement_are_no_epochs(asked):
    finding = asked(drawn(2, 0, with_replacement), ORDINARY)
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "drawn-twice-by-a-rank")
    assert "data='iterations'" in finding.message


class ShortBatch(type(MLP)):
    """An epoch of twelve samples: a batch of ten and one of two."""

    name = "short-batch"
    batch_size, steps_per_epoch, epochs = 10, 2, 1

    def samples(self, devices):
        return 12


def test_a_rank_that_fills_up_its_last_batch_with_samples_of_its_own_is_told_so(asked):
    ranks = [[(0, 1, 2, 3, 4), (10, 11, 0, 1, 2)], [(5, 6, 7, 8, 9), (3, 4, 5, 6, 7)]]
    finding = asked(ranks, ORDINARY, ShortBatch())
    assert (finding.cause, finding.step) == ("last-batch-filled-up", 1)
    assert "with 8 samples" in finding.message


class FewSamples(type(MLP)):
    """Two epochs of eight samples: a rank often draws the same samples in both."""

    name = "few-samples"
    batch_size = 4
    steps_per_epoch = 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_few_samples_may_come_in_the_same_order_by_chance(asked, world):
    workload = FewSamples()
    for seed in range(100):
        generator = random.Random(seed)
        epochs = [generator.sample(range(8), 8) for _ in range(2)]
        share = 4 // world
        ranks = [
            [tuple(ids[start + rank : start + 4 : world]) for ids in epochs for start in (0, 4)]
            for rank in range(world)
        ]
        assert all(len(batch) == share for own in ranks for batch in own)
        finding = asked(ranks, ORDINARY, workload)
        assert finding.outcome is Outcome.PASSED, (seed, finding.message)


def test_a_sample_that_is_drawn_twice_meets_each_of_its_masks():
    """Random masks belong to a draw, not to a sample: with replacement, one step may have two."""
    workload = WORKLOADS["random-masks"]
    oracle = Oracle(workload, 1)
    torch.manual_seed(0)
    ids = (5, 7, 5)
    masks = {name: 2.0 * (torch.rand(3, 64) < 0.5) for name in ("coins 1", "coins 2")}
    weights = {name: parameter.detach() for name, parameter in oracle.model.named_parameters()}
    step = Step((MicroBatch((ids,), ids, masks),), weights, {}, weights, (0.1,))
    (apart,) = with_unique_draws([step])
    oracle.set_forward_state([apart])
    layout = contract_layout([apart], 1, 1)
    assert samples_of(layout) == [5, 7, 5]
    assert len(set(draws(layout))) == 3
    batch = {**oracle.data.batch(ids), **{name: mask.double() for name, mask in masks.items()}}
    expected = torch.autograd.grad(workload.loss(oracle.model(batch), batch), list(oracle.parameters.values()))
    found = oracle.gradient(layout)
    for name, gradient in zip(oracle.parameters, expected, strict=True):
        torch.testing.assert_close(found[name], gradient)


def buffered(cell, keep):
    """Return a training of two ranks with buffers that ``keep`` makes of each rank's own."""
    workload = WORKLOADS["cnn-batchnorm"]
    trainer = Oracle(workload, cell.topology.devices, cell.arithmetic)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    begun = [{name: buffer.clone() for name, buffer in trainer.buffers.items()} for _ in range(cell.processes)]
    steps = [[] for _ in begun]
    for index in range(4):
        shares = [tuple(range(24 * index + 12 * rank, 24 * index + 12 * rank + 12)) for rank in range(2)]
        shares = [tuple(i % len(trainer.data) for i in share) for share in shares]
        for rank, share in enumerate(shares):
            micro = (MicroBatch((share,), share),)
            steps[rank].append(Step(micro, weights, weights, weights, (0.1,), buffers=begun[rank]))
        begun = keep(index, [trainer.buffers_after(own, [share]) for own, share in zip(begun, shares, strict=True)])
    return Trace(tuple(RankTrace(rank, 2, tuple(own)) for rank, own in enumerate(steps)))


def own(index, left):
    return left


def first(index, left):
    return [left[0]] * 2


def averaged_once(index, left):
    if index != 1:
        return left
    mean = {name: (left[0][name] + left[1][name]) / 2 for name in left[0] if left[0][name].is_floating_point()}
    return [{**one, **mean} for one in left]


def summed(index, left):
    total = {name: left[0][name] + left[1][name] for name in left[0] if left[0][name].is_floating_point()}
    return [{**one, **total} for one in left]


def late(index, left):
    return left if index else [left[0], {name: value + 1 for name, value in left[1].items()}]


@pytest.mark.parametrize(
    ("keep", "behavior", "outcome", "cause"),
    [
        (own, OWN_BUFFERS, Outcome.DEVIATES, None),
        (own, ORDINARY, Outcome.FAILED, "buffers-not-broadcast"),
        (first, ORDINARY, Outcome.PASSED, None),
        (first, OWN_BUFFERS, Outcome.FAILED, "buffers-broadcast"),
        (averaged_once, OWN_BUFFERS, Outcome.FAILED, "buffers-averaged"),
        (summed, OWN_BUFFERS, Outcome.FAILED, "buffers-summed"),
        (late, OWN_BUFFERS, Outcome.FAILED, "buffers-updated-otherwise"),
    ],
)
def test_buffers_are_held_to_the_declaration(cell_of, keep, behavior, outcome, cause):
    cell = cell_of("cnn-batchnorm", "ddp", "1x2")
    finding = buffers(TraceAnalysis(buffered(cell, keep), WORKLOADS["cnn-batchnorm"], cell, behavior))
    assert (finding.outcome, finding.cause) == (outcome, cause), finding.message
    assert ("declare buffers='per-rank'" in finding.message) is (cause == "buffers-not-broadcast")


def test_ranks_that_do_not_begin_alike_are_caught(cell_of):
    cell = cell_of("cnn-batchnorm", "ddp", "1x2")
    trace = buffered(cell, own)
    steps = trace.ranks[1].steps
    other = {name: value + 1 for name, value in steps[0].buffers.items()}
    apart = replace(trace.ranks[1], steps=(replace(steps[0], buffers=other), *steps[1:]))
    found = buffers(TraceAnalysis(Trace((trace.ranks[0], apart)), WORKLOADS["cnn-batchnorm"], cell, OWN_BUFFERS))
    assert found.cause == "buffers-begin-apart"


def test_a_forward_of_each_rank_meets_its_own_buffers():
    """The model reads its buffers in training: with buffers per rank, its gradient depends on them."""
    workload = WORKLOADS["checkpoint"]
    oracle = Oracle(workload, 2)
    start = {name: buffer.clone() for name, buffer in oracle.buffers.items()}
    moved = {**start, "average": start["average"] + 0.5, "updates": start["updates"] + 3}
    steps = [
        Step((MicroBatch((ids,), ids),), {}, {}, {}, (0.1,), buffers=b) for ids, b in (((0,), start), ((1,), moved))
    ]
    oracle.set_forward_state(steps, own_buffers=True)
    mine = oracle.forward((1,))
    oracle.set_forward_state(steps)
    assert not torch.equal(mine, oracle.forward((1,)))
    oracle.set_forward_state([replace(steps[1], micro_batches=())])
    assert torch.equal(mine, oracle.forward((1,)))
