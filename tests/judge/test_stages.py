"""A pipeline's stages are judged as one rank: right ones pass, and each mistake of a stage is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plumbline.core.finding import diagnosis
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.causes.counterfactuals import Counterfactuals
from plumbline.judge.causes.stage_pattern import HeldParameters, stage_pattern
from plumbline.judge.replicas import as_replicas, with_empty_steps
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS

DETECTION = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"
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
        ("unused-parameters", "1x2", "16", Outcome.PASSED),
        ("unused-at-the-end", "1x2", "32", Outcome.PASSED),
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
    ("subject", "workload", "checks"),
    [
        ("replicas-apart", "mlp", "ranks-agree gradients"),
        ("same-share", "mlp", "samples"),
        ("stage-doubled", "mlp", "ranks-agree gradients"),
        ("tie-lost", "transformer", "ranks-agree gradients"),
    ],
)
def test_a_mistake_of_replicas_of_stages_is_found(verdict, subject, workload, checks):
    findings, outcome = verdict(subject, workload, "balanced", "2x2", "32", locator=MISTAKES)
    assert outcome is Outcome.FAILED
    failed = {name for name, finding in findings.items() if finding.outcome is Outcome.FAILED}
    assert failed >= set(checks.split()), findings


NAMED = [
    ("stage-gradient-doubled", "mlp/1x2", "stage-scaled", "gradients",
     "2 × the right ones on rank 1 (layers.2.weight and layers.2.bias), and right on all other ranks"),
    ("stage-optimizes-a-copy", "mlp/1x2", "stage-without-gradient", "gradients",
     "zero or absent for the parameters on rank 1 (layers.2.weight and layers.2.bias)"),
    ("stage-restored-after-its-step", "transformer/1x3", "stage-not-updated", "update",
     "the parameters that rank 1 holds did not move (norm_2.weight, norm_2.bias and 4 more)"),
    ("stage-never-steps", "mlp/1x2", "stage-never-stepped", "steps", "rank 1 took no optimizer step"),
    ("stage-stepped-twice", "mlp/1x2", "stage-stepped-again", "steps",
     "rank 1 took 12 optimizer steps for 6 batches, but other ranks took one per batch"),
    ("tied-gradients-not-added", "transformer/1x4", "tied-gradients-not-added", "gradients",
     "right, but for tokens.weight, which several ranks hold, rank 0 stepped with only its own part"),
    ("tied-gradients-added-on-the-first-stage", "transformer/1x4", "tied-gradients-not-added", "ranks-agree",
     "ranks 0 and 3 both hold tokens.weight, but step with different gradients for it"),
    ("tied-gradients-averaged", "transformer/1x2", "tied-gradients-scaled", "gradients",
     "those of tokens.weight, which several ranks hold, are 0.5 × the right ones"),
    ("divided-by-micro-batches-twice", "mlp/1x2", "divided-twice", "gradients",
     "divided twice by the 4 micro-batches of a batch"),
    ("divided-by-stages", "cnn-batchnorm/1x3", "divided-by-the-number-of-stages", "gradients",
     "divided by the number of stages, 3"),
    ("statistics-updated-by-the-recomputation", "cnn-batchnorm/1x2", "statistics-updated-again", "buffers",
     "each forward updates the statistics twice: check whether activations are recomputed in training mode"),
    ("statistics-updated-before-the-first-step", "cnn-batchnorm/1x2", "statistics-updated-again", "buffers",
     "the first forward started with buffers that differ from the job's"),
    ("activations-of-another-micro-batch", "mlp/1x2", "activations-of-another-micro-batch", "gradients",
     "on rank 0 (layers.0.weight and layers.0.bias) the backward went through the activations of another"),
    ("labels-in-the-reverse-order", "mlp/1x2", "targets-of-another-micro-batch", "gradients",
     "those of one micro-batch's activations with the targets of another"),
    ("last-micro-batch-without-a-backward", "mlp/1x2", "last-micro-batches-missing", "gradients",
     "without the last of 4 micro-batches"),
    ("last-micro-batch-dropped", "mlp/1x2", "micro-batches-missing", "samples",
     "only 3 of the 4 micro-batches of a batch are computed"),
    ("clipped-by-the-norm-of-the-own-stage", "clipping/1x3", "clipped-stage-by-stage", "gradients",
     "clipped on each rank by the norm of its own parameters only"),
    ("clipped-by-the-norm-of-the-last-stage", "clipping/1x2", "clipped-by-the-norm-of-one-stage", "gradients",
     "clipped by the norm of rank 1's parameters only"),
    ("tied-weights-counted-twice-in-the-norm", "clipping-tied/1x2", "shared-parameter-counted-again", "gradients",
     "clipped by a norm in which a parameter that several ranks hold counts once for each of them"),
    ("schedule-on-the-first-stage-only", "schedule/1x2", "schedule-never-stepped", "learning-rate", "on rank 1"),
    ("masks-drawn-anew-by-the-recomputation", "random-masks/1x2", "masks-drawn-anew-in-the-backward", "rng",
     "activations are recomputed with different random numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "cell", "cause", "check", "words"), NAMED, ids=[one[0] for one in NAMED])
def test_a_mistake_of_a_stage_is_named(verdict, subject, cell, cause, check, words):
    """The cause says what happened on which rank, and comes before its consequences."""
    workload, topology = cell.split("/")
    findings, outcome = verdict(subject, workload, "pp", topology)
    first = diagnosis(findings.values())
    assert outcome.is_bad
    assert (first.check, first.cause) == (check, cause), findings
    assert words in first.message


def test_ranks_that_share_sequences_are_no_stages(verdict, monkeypatch):
    """Each holds the whole model: none is accused by itself, and no prediction is said to fit without one."""
    # The gradient of a loss over a transformer's many outputs takes ten times as long as everything else.
    monkeypatch.setattr(Counterfactuals, "nearest_loss_gradient", lambda *_: None)
    findings, outcome = verdict("keys-without-the-others-gradients", "transformer", "sp", "1x2", locator=DETECTION)
    first = diagnosis(findings.values())
    assert outcome is Outcome.FAILED
    assert (first.cause, first.family, first.cause_x_noise) == ("exchanged-otherwise", "sync", None)
    assert "from this prediction" not in first.message
    assert "right for all others" not in first.message


def test_stages_of_which_one_has_no_parameters_and_makes_no_steps_are_right(verdict):
    findings, outcome = verdict("stage-without-an-optimizer", "schedule", "pp", "1x3")
    assert outcome is Outcome.PASSED, findings


def test_a_tied_weight_that_one_stage_steps_and_sends_to_the_other_is_right(verdict):
    findings, outcome = verdict("tied-weight-stepped-on-one-stage", "transformer", "pp", "1x2")
    assert outcome is Outcome.PASSED, findings


def test_a_rank_that_holds_both_ends_of_the_model_is_right(verdict):
    """It computes all forwards before its first loss."""
    findings, outcome = verdict("interleaved-stages", "mlp", "pp", "1x2")
    assert outcome is Outcome.PASSED, findings


def stage(rank, held, gradients, *, loss=None, buffers=(), drawn=()):
    """Return a rank's trace of one step: its own weights, two micro-batches, and their losses on one stage only."""
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


def test_samples_are_those_of_the_rank_that_left_a_pass_for_each_micro_batch():
    """A rank with the first and last blocks runs all forwards before its first loss, which ends one pass."""
    both = MicroBatch(((0,), (1,)), (0,)), MicroBatch((), (1,))
    each = MicroBatch(((0,),)), MicroBatch(((1,),))
    ends, middle = (RankTrace(rank, 2, (Step(own, {}, {}, {}, ()),)) for rank, own in enumerate((both, each)))
    (joined,) = as_replicas(Trace((ends, middle)), ((0, 1),)).ranks
    assert [(micro.forwards, micro.loss) for micro in joined.steps[0].micro_batches] == [
        (((0,),), (0,)),
        (((1,),), (1,)),
    ]


def test_a_rank_without_parameters_has_an_empty_step_for_each_one_of_the_others():
    working = stage(0, {"a": 1}, ["a"])
    idle = RankTrace(1, 2, (), holds_nothing=True)
    found = with_empty_steps(Trace((working, idle)), ((0, 1),))
    assert [len(rank.steps) for rank in found.ranks] == [1, 1]
    assert found.ranks[1].steps[0].before == {}
    forgetful = Trace((working, RankTrace(1, 2, ())))
    assert with_empty_steps(forgetful, ((0, 1),)) is forgetful


def test_the_pattern_of_stages_names_who_is_wrong_and_by_which_factor():
    held = HeldParameters({"a": (0,), "tied": (0, 2), "b": (1,), "c": (2,)})
    right = {name: torch.ones(3) for name in held.holders}
    found = stage_pattern(held, ["b"], [(right, {**right, "b": torch.full((3,), 4.0)})] * 3)
    assert (found.ranks, found.wrong_ranks, found.in_part) == ((0, 1, 2), (1,), True)
    assert found.factors == {0: 1, 1: 4, 2: 1}
    assert found.figures["stage_factors"] == "4 × the right ones on rank 1"
    assert held.shared == {"tied": (0, 2)}
    assert (held.on(2), held.first_on(2), held.only_on(0)) == ({"tied", "c"}, {"c"}, {"a"})
