"""Ranks that share parameter memory are named, whatever the order in which steps were seen; others are not."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.causes.shared_memory import SHARED_MEMORY, moved_by_others
from plumbline.judge.hypothesis import TraceCase, most_specific
from plumbline.judge.judge import judge
from plumbline.judge.oracle.oracle import Oracle
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS

MLP = WORKLOADS["mlp"]


def shares_of(world, batch):
    """Split a step's samples over the ranks, in order; each computes its own at once."""
    return [(tuple(share.tolist()),) for share in torch.tensor(batch).chunk(world)]


def cell_of(world):
    return Cell("somebody", "mlp", "ddp", Topology(1, world), "32", "cpu")


def trace_in_one_memory(world, seed):
    """Every rank's update changes all ranks' weights; a rank sees some of them, and the rest later."""
    rng, torn = random.Random(seed), torch.Generator().manual_seed(seed)
    cell = cell_of(world)
    trainer = Oracle(MLP, world, cell.arithmetic)
    optimizer = trainer.optimizer()
    size = MLP.global_batch_size(world)
    steps = [[] for _ in range(world)]
    memory = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    missing = [{name: torch.zeros_like(value) for name, value in memory.items()} for _ in range(world)]
    for _ in range(MLP.epochs):
        order = rng.sample(range(len(trainer.data)), len(trainer.data))
        for start in range(0, len(order), size):
            ranks = shares_of(world, order[start : start + size])
            trainer.load(memory)
            gradients = trainer.gradient((tuple(ranks),))
            trainer.set_gradients(gradients)
            optimizer.step()
            update = {name: value - memory[name] for name, value in trainer.weights().items()}
            rates = tuple(group["lr"] for group in optimizer.param_groups)
            for rank, forwards in enumerate(ranks):
                before = {name: value - missing[rank][name] for name, value in memory.items()}
                landed = {n: torch.rand(v.shape, generator=torn) < rng.random() for n, v in memory.items()}
                seen = {n: memory[n] + update[n] * (1 + (world - 1) * landed[n]) for n in memory}
                # Half of the time, the others' steps arrive before this rank's next step; otherwise later.
                late = rng.random() < 0.5
                missing[rank] = {
                    n: (memory[n] + world * update[n] - seen[n] if late else torch.zeros_like(seen[n])) for n in memory
                }
                micro = (MicroBatch(forwards, tuple(i for share in forwards for i in share)),)
                steps[rank].append(Step(micro, before, gradients, seen, rates, False, None))
            memory = {name: value + world * update[name] for name, value in memory.items()}
    return Trace(tuple(RankTrace(rank, world, tuple(own)) for rank, own in enumerate(steps)))


@given(st.integers(2, 4), st.integers(0, 1000))
def test_shared_memory_is_named_whatever_was_seen_when(world, seed):
    trace = trace_in_one_memory(world, seed)
    best = most_specific([SHARED_MEMORY], TraceCase(TraceAnalysis(trace, MLP, cell_of(world))))
    assert best is not None
    assert best[0].name == "applied-once-a-rank"


def test_the_verdict_names_it_too():
    findings = judge(TraceAnalysis(trace_in_one_memory(3, 0), MLP, cell_of(3)))
    causes = {finding.check: finding.cause for finding in findings if finding.outcome.is_bad}
    assert causes["update"] == causes["ranks-agree"] == "applied-once-a-rank"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_right_ranks_share_nothing(world, simulation):
    trace = simulation.right_trace(MLP, cell_of(world))
    assert moved_by_others(TraceAnalysis(trace, MLP, cell_of(world))) is None


def trace_in_own_memory(world, updates, *, synchronised, seed=0):
    """Ranks with their own weights; ``updates(rank, step)`` returns how often a rank applies its update."""
    rng, cell = random.Random(seed), cell_of(world)
    trainer = Oracle(MLP, world, cell.arithmetic)
    optimizer = trainer.optimizer()
    size = MLP.global_batch_size(world)
    weights = [{name: p.detach().clone() for name, p in trainer.parameters.items()} for _ in range(world)]
    steps = [[] for _ in range(world)]
    for _ in range(MLP.epochs):
        order = rng.sample(range(len(trainer.data)), len(trainer.data))
        for start in range(0, len(order), size):
            ranks = shares_of(world, order[start : start + size])
            for rank, forwards in enumerate(ranks):
                before = weights[rank]
                trainer.load(before)
                gradients = trainer.gradient((tuple(ranks),) if synchronised else ((forwards,),))
                trainer.set_gradients(gradients)
                optimizer.step()
                count = updates(rank, len(steps[rank]))
                weights[rank] = {n: before[n] + count * (v - before[n]) for n, v in trainer.weights().items()}
                rates = tuple(group["lr"] for group in optimizer.param_groups)
                micro = (MicroBatch(forwards, tuple(i for share in forwards for i in share)),)
                steps[rank].append(Step(micro, before, gradients, weights[rank], rates, False, None))
    return Trace(tuple(RankTrace(rank, world, tuple(own)) for rank, own in enumerate(steps)))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "updates",
    [
        pytest.param(lambda rank, step: 1, id="once"),
        pytest.param(lambda rank, step: 1 + rank, id="as often as its rank says"),
        pytest.param(lambda rank, step: 2 if rank == 0 else 1, id="twice on rank 0"),
        pytest.param(lambda rank, step: 1 + step % 2, id="twice at every second step"),
    ],
)
@pytest.mark.parametrize("synchronised", [True, False])
def test_ranks_that_merely_part_share_nothing(world, updates, synchronised):
    trace = trace_in_own_memory(world, updates, synchronised=synchronised)
    assert moved_by_others(TraceAnalysis(trace, MLP, cell_of(world))) is None


def test_the_verdict_on_an_unsynchronised_trainer_names_no_shared_memory():
    trace = trace_in_own_memory(2, lambda rank, step: 1, synchronised=False)
    findings = [finding for finding in judge(TraceAnalysis(trace, MLP, cell_of(2))) if finding.outcome.is_bad]
    assert (findings[0].check, findings[0].cause) == ("gradients", "not-synchronised")
    assert all(finding.consequence_of == "gradients" for finding in findings[1:])
    assert not [finding for finding in findings if "memory" in finding.message]


def test_as_many_updates_as_ranks_in_every_step_may_be_either():
    trace = trace_in_own_memory(2, lambda rank, step: 2, synchronised=True)
    first = next(finding for finding in judge(TraceAnalysis(trace, MLP, cell_of(2))) if finding.outcome.is_bad)
    assert (first.check, first.cause) == ("update", "applied-once-a-rank")
    assert "or step more than once" in first.message
