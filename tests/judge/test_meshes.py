"""Ranks that hold one model together, along any dimension of a mesh, are judged by what they compute together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.core.outcome import Outcome
from harness.evidence.trace import MicroBatch, RankTrace, Step, Trace
from harness.judge.replicas import with_whole_models
from harness.judge.sampler_draws import unlike_members
from harness.judge.trace_analysis import TraceAnalysis
from harness.workloads import WORKLOADS

MISTAKES = Path(__file__).parent / "subjects" / "wrong_meshes.py"


@pytest.mark.parametrize(
    ("workload", "backend", "topology", "expected"),
    [
        ("transformer", "tp", "1x3", Outcome.PASSED),
        ("clipping", "fsdp+tp", "1x4", Outcome.PASSED),
        ("cnn-batchnorm", "hsdp", "1x4", Outcome.DEVIATES),
        ("experts", "ep", "1x3", Outcome.PASSED),
        ("experts", "fsdp+tp", "1x8@2x4", Outcome.PASSED),
    ],
)
def test_torch_on_meshes(verdict, workload, backend, topology, expected):
    findings, outcome = verdict("torch", workload, backend, topology, locator="torch")
    assert outcome is expected, findings


@pytest.mark.parametrize(
    ("subject", "workload", "backend", "topology", "check", "cause"),
    [
        ("tp-by-rank", "mlp", "tp", "1x2", "samples", "replica-of-different-samples"),
        ("tp-by-rank", "mlp", "ddp+tp", "1x4", "samples", "replica-of-different-samples"),
        ("experts-not-divided", "experts", "ep", "1x2", "gradients", None),
    ],
)
def test_a_mistake_on_a_mesh_is_found(verdict, subject, workload, backend, topology, check, cause):
    findings, outcome = verdict(subject, workload, backend, topology, locator=MISTAKES)
    assert outcome is Outcome.FAILED
    assert findings[check].outcome is Outcome.FAILED, findings
    assert cause is None or findings[check].cause == cause


def rank_with(rank, weights, gradients, samples=(0, 1)):
    """Return a rank's trace of one step."""
    held = {name: torch.full((2,), float(value)) for name, value in weights.items()}
    step = Step(
        (MicroBatch((samples,), samples),), held, {name: held[name] * 2 for name in gradients}, held, (0.1,)
    )  # fmt: skip
    return RankTrace(rank, 2, (step,), final=held)


def test_a_rank_gets_the_experts_that_it_does_not_hold_and_keeps_its_own_samples():
    trace = Trace((rank_with(0, {"a": 1, "b": 2}, ["a", "b"]), rank_with(1, {"a": 1, "c": 3}, ["a"], (2, 3))))
    for own in with_whole_models(trace, ((0, 1),)).ranks:
        (step,) = own.steps
        assert {name: float(value[0]) for name, value in step.before.items()} == {"a": 1, "b": 2, "c": 3}
        assert step.gradients.keys() == {"a", "b"}  # its holder has none of c
        assert step.micro_batches == trace.ranks[own.rank].steps[0].micro_batches
        assert own.final is not None
        assert own.final.keys() == {"a", "b", "c"}


def test_ranks_that_hold_the_same_are_left_as_they_are():
    trace = Trace((rank_with(0, {"a": 1}, ["a"]), rank_with(1, {"a": 1}, ["a"])))
    assert with_whole_models(trace, ((0, 1),)) is trace


@pytest.mark.parametrize(("samples", "found"), [((1, 0), None), ((), None), ((0, 2), (0, 0, 1))])
def test_members_of_a_replica_use_its_samples_in_any_order(cell_of, samples, found):
    trace = Trace((rank_with(0, {"a": 1}, []), rank_with(1, {"a": 1}, [], samples)))
    analysis = TraceAnalysis(trace, WORKLOADS["mlp"], cell_of("mlp", "tp", "1x2"))
    assert unlike_members(analysis) == found
