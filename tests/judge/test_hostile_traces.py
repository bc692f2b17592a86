"""Evidence that is empty, incomplete or changed afterwards never passes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from plumbline.core.outcome import Outcome, worst
from plumbline.evidence.trace import Exit, MicroBatch, RankTrace, Step, Trace
from plumbline.workloads import WORKLOADS

PLAIN = ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")


FACTORS = (1 + 1e-4, 1 - 1e-4, 0.5, 0.0, -1.0)


@pytest.fixture(scope="module")
def right_trace(simulation):
    return cache(lambda cell: simulation.right_trace(WORKLOADS[cell.workload], cell))


@pytest.fixture
def judged(simulation, right_trace, cell_of):
    """Judge a right trace of two ranks after ``change``; return the findings and the outcome."""

    def judged(change, workload="mlp", backend="ddp", topology="1x2"):
        cell = cell_of(workload, backend, topology)
        findings = simulation.judge(change(right_trace(cell)), WORKLOADS[workload], cell)
        return findings, worst(finding.outcome for finding in findings.values())

    return judged


def on(rank, step, **changes):
    """Return a change of one step on one rank; values may be functions of the previous ones."""

    def change(trace):
        steps = list(trace.ranks[rank].steps)
        old = steps[step]
        new = {key: value(getattr(old, key)) if callable(value) else value for key, value in changes.items()}
        steps[step] = replace(old, **new)
        ranks = list(trace.ranks)
        ranks[rank] = replace(ranks[rank], steps=tuple(steps))
        return replace(trace, ranks=tuple(ranks))

    return change


def every_rank(function):
    return lambda trace: replace(trace, ranks=tuple(function(rank) for rank in trace.ranks))


def scaled(factor):
    return lambda tensors: {name: value * factor for name, value in tensors.items()}


def without_one(tensors):
    return dict(list(tensors.items())[1:])


def reshaped(tensors):
    return {name: value.reshape(-1)[:1] for name, value in tensors.items()}


def ids(change):
    return lambda micro: (MicroBatch((tuple(change(i) for i in micro[0].forwards[0]),), None),)


CHANGES = {
    "nothing at all": lambda trace: Trace(()),
    "no steps": every_rank(lambda rank: replace(rank, steps=())),
    "no steps on one rank": lambda trace: Trace((trace.ranks[0], replace(trace.ranks[1], steps=()))),
    "one rank missing": lambda trace: Trace(trace.ranks[:1]),
    "one rank twice": lambda trace: Trace((trace.ranks[0], trace.ranks[0])),
    "ranks in another order": lambda trace: Trace(trace.ranks[::-1]),
    "a rank too many": lambda trace: Trace((*trace.ranks, replace(trace.ranks[1], rank=2))),
    "another world": every_rank(lambda rank: replace(rank, world_size=3)),
    "a world of one": every_rank(lambda rank: replace(rank, world_size=1)),
    "empty steps": every_rank(lambda rank: RankTrace(rank.rank, 2, (Step((), {}, {}, {}, ()),) * 6)),
    "a step missing": every_rank(lambda rank: replace(rank, steps=rank.steps[:-1])),
    "a step missing on one rank": lambda trace: Trace(
        (trace.ranks[0], replace(trace.ranks[1], steps=trace.ranks[1].steps[1:]))
    ),
    "steps in another order": every_rank(lambda rank: replace(rank, steps=rank.steps[::-1])),
    "every step skipped": every_rank(
        lambda rank: replace(rank, steps=tuple(replace(step, skipped=True) for step in rank.steps))
    ),
    "one step skipped on one rank": on(1, 2, skipped=True),
    "a gradient scaled": on(1, 3, gradients=scaled(1.001)),
    "a gradient without its names": on(1, 3, gradients={}),
    "a gradient without one parameter": on(0, 3, gradients=without_one),
    "a gradient of another shape": on(0, 3, gradients=reshaped),
    "a gradient that is not a number": on(0, 3, gradients=scaled(math.nan)),
    "an infinite gradient": on(0, 3, gradients=scaled(math.inf)),
    "a gradient under other names": on(0, 3, gradients=lambda t: {f"module.{name}": v for name, v in t.items()}),
    "other weights before": on(0, 3, before=scaled(1.001)),
    "other weights after": on(1, 3, after=scaled(1.001)),
    "weights that are not numbers": on(1, 3, after=scaled(math.nan)),
    "weights of another shape": on(0, 3, after=reshaped),
    "weights missing before": on(0, 0, before=without_one),
    "weights missing after": on(0, 5, after=without_one),
    "no weights after": on(0, 5, after={}),
    "other samples": on(0, 2, micro_batches=ids(lambda i: (i + 1) % 72)),
    "samples there are not": on(0, 2, micro_batches=ids(lambda i: i + 72)),
    "negative samples": on(0, 2, micro_batches=ids(lambda i: i - 72)),
    "no samples": on(0, 2, micro_batches=()),
    "empty samples": on(0, 2, micro_batches=(MicroBatch(()),)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_it_never_passes(judged, change):
    _, outcome = judged(change)
    assert outcome.is_bad


def test_the_same_evidence_unchanged_does(judged):
    findings, outcome = judged(lambda trace: trace)
    assert outcome is Outcome.PASSED, findings


@pytest.mark.parametrize(
    ("workload", "factor"),
    [("mlp", factor) for factor in FACTORS] + [(one, FACTORS[0]) for one in PLAIN if one != "mlp"],
)
def test_a_changed_gradient_fails_in_every_problem(judged, workload, factor):
    findings, _ = judged(on(0, 4, gradients=scaled(factor)), workload)
    assert findings["gradients"].outcome is Outcome.FAILED
    assert findings["gradients"].step == 4


def test_in_the_exact_problem_one_bit_is_enough(judged):
    def one_bit(tensors):
        return {name: torch.nextafter(value, torch.tensor(math.inf)) for name, value in tensors.items()}

    assert judged(on(0, 4, gradients=one_bit), "linear-exact")[0]["gradients"].outcome is Outcome.FAILED
    assert judged(on(0, 5, after=one_bit), "linear-exact")[0]["update"].outcome is Outcome.FAILED


def test_the_rank_that_raised_first_is_named(judged):
    def change(trace):
        first, second = trace.ranks
        return Trace((replace(first, error="lost", failed_at=20.0), replace(second, error="Boom", failed_at=10.0)))

    findings, outcome = judged(change)
    assert outcome is Outcome.ERRORED
    assert findings["launch"].rank == 1
    assert "Boom" in findings["launch"].message


def test_a_rank_that_died_explains_those_that_lost_it(judged):
    def change(trace):
        return Trace(
            (replace(trace.ranks[0], error="lost", failed_at=1.0),), {1: Exit(Outcome.CRASHED, "killed by signal 9")}
        )

    findings, outcome = judged(change)
    assert outcome is Outcome.CRASHED
    assert findings["launch"].rank == 1


def test_a_verdict_does_not_depend_on_the_global_generator(judged):
    torch.manual_seed(1)
    first, _ = judged(lambda trace: trace, "contrastive")
    torch.manual_seed(2)
    second, _ = judged(lambda trace: trace, "contrastive")
    assert first == second


def test_judging_leaves_the_global_generator_alone(judged):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    judged(lambda trace: trace)
    assert torch.equal(torch.get_rng_state(), before)
