"""The stages of a pipeline are judged as one rank: right ones pass, and each mistake of a stage is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.core.outcome import Outcome
from harness.evidence.trace import MicroBatch, RankTrace, Step, Trace
from harness.judge.replicas import as_replicas
from harness.judge.trace_analysis import TraceAnalysis
from harness.workloads import WORKLOADS

MISTAKES = Path(__file__).parent / "subjects" / "wrong_stages.py"


@pytest.mark.parametrize(
    ("workload", "topology", "precision", "expected"),
    [
        ("mlp", "1x2", "16", Outcome.PASSED),
        ("transformer", "1x2", "32", Outcome.PASSED),
        ("cnn-batchnorm", "1x2", "32", Outcome.DEVIATES),
        ("accumulation", "1x2", "32", Outcome.PASSED),
        ("several-optimizers", "1x2", "32", Outcome.PASSED),
        ("random-masks", "1x2", "32", Outcome.PASSED),
        ("checkpoint-windows", "1x2", "32", Outcome.PASSED),
        ("checkpoint", "1x2", "16", Outcome.PASSED),
        ("thawed", "1x2", "32", Outcome.PASSED),
        ("checkpoint-elastic", "2x2", "32", Outcome.PASSED),
        ("cnn-batchnorm", "2x2", "32", Outcome.DEVIATES),
        ("transformer", "2x2", "32", Outcome.PASSED),
        ("validation", "2x2", "32", Outcome.DEVIATES),
        ("thawed", "2x2", "32", Outcome.PASSED),
        ("transformer", "2x1", "32", Outcome.PASSED),
    ],
)
def test_the_reference_trainer_in_stages(verdict, workload, topology, precision, expected):
    findings, outcome = verdict("reference", workload, "balanced", topology, precision, locator="reference")
    assert outcome is expected, findings


@pytest.mark.parametrize(
    ("subject", "workload", "topology", "checks"),
    [
        ("stage-doubled", "mlp", "1x2", "gradients"),
        ("stage-stands-still", "mlp", "1x2", "gradients"),
        ("tie-lost", "transformer", "1x2", "ranks-agree gradients"),
        ("tie-on-one-stage", "transformer", "1x2", "ranks-agree"),
        ("sum-of-micro-batches", "mlp", "1x2", "gradients"),
        ("other-micro-batch", "mlp", "1x2", "gradients"),
        ("forward-twice", "mlp", "1x2", "samples"),
        ("statistics-twice", "cnn-batchnorm", "1x2", "buffers"),
        ("replicas-apart", "mlp", "2x2", "ranks-agree gradients"),
        ("same-share", "mlp", "2x2", "samples"),
        ("stage-doubled", "mlp", "2x2", "ranks-agree gradients"),
        ("tie-lost", "transformer", "2x2", "ranks-agree gradients"),
    ],
)
def test_a_mistake_of_a_stage_is_found(verdict, subject, workload, topology, checks):
    findings, outcome = verdict(subject, workload, "balanced", topology, "32", locator=MISTAKES)
    assert outcome is Outcome.FAILED
    failed = {name for name, finding in findings.items() if finding.outcome is Outcome.FAILED}
    assert failed >= set(checks.split()), findings


def stage(rank, held, gradients, *, loss=None, buffers=(), drawn=()):
    """Return a rank's trace of one step: weights of its own, two micro-batches, their losses on one stage alone."""
    weights = {name: torch.full((2,), float(value)) for name, value in held.items()}
    passes = tuple(
        MicroBatch(((number,),), (number,) if loss else None, {name: torch.ones(1) for name in drawn})
        for number in range(2)
    )
    step = Step(
        passes, weights, {name: weights[name] * 2 for name in gradients}, weights, (0.1,),
        buffers={name: torch.zeros(1) for name in buffers},
    )  # fmt: skip
    return RankTrace(rank, 2, (step,), final=weights)


def test_stages_are_one_rank_with_all_weights_and_the_samples_once():
    trace = Trace(
        (
            stage(0, {"first": 1, "tied": 2, "frozen": 3}, ["first", "tied"], buffers=["mean"], drawn=["mask"]),
            stage(1, {"last": 4, "tied": 5}, ["last", "tied"], loss=True, drawn=["other"]),
        )
    )
    (joined,) = as_replicas(trace, ((0, 1),)).ranks
    (step,) = joined.steps
    assert {name: float(value[0]) for name, value in step.before.items()} == {
        "first": 1, "tied": 2, "frozen": 3, "last": 4,
    }  # fmt: skip
    assert {name: float(value[0]) for name, value in step.gradients.items()} == {"first": 2, "tied": 4, "last": 8}
    assert step.buffers.keys() == {"mean"}
    assert [micro.samples for micro in step.micro_batches] == [(0,), (1,)]
    assert [micro.loss for micro in step.micro_batches] == [(0,), (1,)]
    assert step.micro_batches[0].drawn.keys() == {"mask", "other"}
    assert joined.final is not None
    assert joined.final.keys() == step.after.keys()


def test_a_weight_without_a_gradient_where_it_is_held_has_none():
    trace = Trace((stage(0, {"tied": 1}, []), stage(1, {"tied": 1}, ["tied"], loss=True)))
    assert as_replicas(trace, ((0, 1),)).ranks[0].steps[0].gradients == {}


def test_ranks_that_are_alone_are_left_as_they_are():
    trace = Trace((stage(0, {"a": 1}, ["a"]), stage(1, {"a": 1}, ["a"])))
    assert as_replicas(trace, ((0,), (1,))) is trace


def test_the_contract_keeps_the_micro_batches_and_one_device_does_not(cell_of):
    step = Step(tuple(MicroBatch(((2 * n, 2 * n + 1),), (2 * n, 2 * n + 1)) for n in range(2)), {}, {}, {}, ())
    trace = Trace(tuple(RankTrace(rank, 2, (step,)) for rank in range(2)))
    analysis = TraceAnalysis(trace, WORKLOADS["mlp"], cell_of("mlp", "balanced", "1x2"))
    layout = analysis.layouts[0]
    assert layout == ((((0, 1),),), (((2, 3),),))
    assert analysis.one_device(layout) == ((((0, 1, 2, 3),),),)
