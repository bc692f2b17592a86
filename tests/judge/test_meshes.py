"""Ranks that hold one model together, along any mesh dimension, are judged by their joint result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.checks import CHECKS
from plumbline.judge.independent_draws import unlike_members
from plumbline.judge.oracle.dropout_masks import mask_shapes
from plumbline.judge.replicas import as_replicas, with_whole_models
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS

DETECTION = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"
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


@pytest.mark.parametrize(
    ("subject", "workload", "backend", "topology", "cause"),
    [
        ("pieces-of-an-unpadded-tensor", "mlp", "zero2", "1x3", "shifted-in-a-flat-tensor"),
        ("norm-of-the-own-piece", "clipping", "zero2", "1x2", "clipped-shard-by-shard"),
        ("parts-added-in16-bits", "mlp", "fsdp", "1x3", "rounded-to-16-bits"),
        ("row-bias-added-on-every-rank", "mlp", "tp", "1x2", "bias-added-on-every-rank"),
        ("norm-of-whole-parameters-only", "clipping", "tp", "1x2", "left-out-of-the-norm"),
        ("labels-at-seams-missing", "lm-tokens", "cp", "1x2", "tokens-at-seams-missing"),
        ("router-of-own-experts", "experts", "ep", "1x2", "router-of-own-experts"),
        ("divided-by-the-window-at-each-boundary", "accumulation", "pp", "1x2", "stage-scaled"),
    ],
)
def test_a_mistake_on_a_mesh_is_named(verdict, subject, workload, backend, topology, cause):
    """By what ranks hold, and by what they exchange."""
    findings, outcome = verdict(subject, workload, backend, topology, locator=DETECTION)
    assert outcome is Outcome.FAILED
    assert findings["gradients"].cause == cause, findings["gradients"]


def test_a_finding_names_the_ranks_that_hold_the_wrong_replica(verdict):
    findings, _ = verdict("whole-parameters-not-averaged", "mlp", "ddp+tp", "1x4", locator=DETECTION)
    assert findings["gradients"].message.startswith("gradients at step 0 on ranks 0 and 1 are averaged for some")


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


def drew(rank, mask):
    """Return a rank's trace of one step whose layer drew this mask, a row for each of two samples."""
    trace = rank_with(rank, {"a": 1}, ["a"])
    (step,) = trace.steps
    (micro,) = step.micro_batches
    return replace(trace, steps=(replace(step, micro_batches=(replace(micro, drawn={"coins": mask}),)),))


def test_masks_that_ranks_drew_for_their_units_are_put_together_and_others_are_the_first_ranks():
    left, right = torch.ones(2, 3), torch.zeros(2, 5)
    replica = as_replicas(Trace((drew(0, left), drew(1, right))), ((0, 1),), {"coins": (8,)}).ranks[0]
    assert torch.equal(replica.steps[0].micro_batches[0].drawn["coins"], torch.cat((left, right), 1))
    replica = as_replicas(Trace((drew(0, left), drew(1, left))), ((0, 1),), {"coins": (3,)}).ranks[0]
    assert torch.equal(replica.steps[0].micro_batches[0].drawn["coins"], left)


def test_the_shapes_of_masks_are_those_of_a_whole_model():
    assert mask_shapes(WORKLOADS["random-masks"], 2) == {"coins 1": (64,), "coins 2": (64,)}
    assert mask_shapes(WORKLOADS["mlp"], 2) == {}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_any_member_of_a_replica_begins_with_is_the_jobs(simulation, cell_of, rank):
    workload, cell = WORKLOADS["mlp"], cell_of("mlp", "tp", "1x3")
    (right,) = simulation.right_trace(workload, cell_of("mlp", "none", "1x1")).ranks
    members = [replace(right, rank=number, world_size=3) for number in range(3)]
    analysis = TraceAnalysis(Trace(tuple(members)), workload, cell)
    assert CHECKS[TraceAnalysis]["initial-weights"](analysis).outcome is Outcome.PASSED
    first = members[rank].steps[0]
    other = {name: value + 1 if "bias" in name else value for name, value in first.before.items()}
    members[rank] = replace(members[rank], steps=(replace(first, before=other), *members[rank].steps[1:]))
    finding = CHECKS[TraceAnalysis]["initial-weights"](TraceAnalysis(Trace(tuple(members)), workload, cell))
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "not-broadcast")
