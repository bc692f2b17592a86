"""From evidence to sentences: whether the adapter or the trainer is wrong, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.engine.adapter_diagnosis import SmokeEvidence, diagnose, refused
from plumbline.evidence.trace import Evaluation, Exit, MicroBatch, RankTrace, Step, Trace
from plumbline.judge.causes.launch import SEE_LOG

PASSED = (Finding("gradients", Outcome.PASSED, "as it should be"),)
BEGIN = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
END = {name: value + 1 for name, value in BEGIN.items()}
GRADIENTS = {name: torch.ones_like(value) for name, value in BEGIN.items()}


def step_of(rank, **changes):
    samples = (2 * rank, 2 * rank + 1)
    return replace(Step((MicroBatch((samples,), samples),), BEGIN, GRADIENTS, END, (0.1,)), **changes)


def rank_of(rank, *steps, **changes):
    return replace(RankTrace(rank, 2, steps, final=END), **changes)


@pytest.fixture
def evidence(cell_of):
    """Return the evidence of two ranks, each made by a function of its number; right ones by default."""

    def evidence(make=lambda rank: rank_of(rank, step_of(rank)), findings=PASSED, **changes):
        trace = Trace((make(0), make(1)))
        return replace(SmokeEvidence(cell_of("mlp", "ddp", "1x2"), trace, tuple(findings), BEGIN), **changes)

    return evidence


def broken(outcome, cause="raised", family="launch"):
    message = f"rank 1: ValueError: no: the launch ended with an error; {SEE_LOG}\nlast output of rank 1:\nno"
    return [Finding("launch", outcome, message, cause=cause, family=family, hint=SEE_LOG)]


def test_what_is_right(evidence):
    verdict = diagnose(evidence())
    assert verdict.code == 0
    assert verdict.sentences[0] == ("The adapter is right: 2 connected ranks, 1 optimizer step, 4 samples.")
    assert verdict.sentences[-1].startswith("The trainer is right here: it computes what one device computes")
    assert len(verdict.sentences) == 2


def test_a_loss_of_one_s_own_is_fine_and_is_said(evidence):
    own = evidence(lambda rank: rank_of(rank, step_of(rank, micro_batches=(MicroBatch(((rank,),)),))))
    assert diagnose(own).code == 0
    assert "job.loss was not called" in diagnose(own).sentences[1]


def test_a_backend_s_own_promise_is_no_mistake(evidence):
    verdict = diagnose(evidence(findings=(*PASSED, Finding("buffers", Outcome.DEVIATES, "ranks see their share"))))
    assert verdict.code == 0
    assert "what ddp promises, which differs" in verdict.sentences[-1]


def test_a_wrong_trainer_has_a_right_adapter(evidence):
    verdict = diagnose(evidence(findings=(*PASSED, Finding("update", Outcome.FAILED, "not averaged"))))
    assert verdict.code == 1
    assert verdict.sentences[0].startswith("The adapter is right")
    assert verdict.sentences[-2:] == ("The trainer is wrong:", "- update: failed: not averaged")


WRONG = {
    "job.model() was never called. Train": lambda rank: rank_of(rank, step_of(rank), final=None),
    "rank 0 trained, but rank 1 took no step": lambda rank: rank_of(rank, *[step_of(rank)] * (rank == 0)),
    "the weights changed, but no optimizer step was recorded": lambda rank: rank_of(rank),
    "train(job) returned before training, or does not call": lambda rank: rank_of(rank, final=BEGIN),
    "each had a world size of 1": lambda rank: rank_of(rank, step_of(rank), world_size=1),
    "was never called with a whole batch": lambda rank: rank_of(
        rank, step_of(rank, micro_batches=(MicroBatch(((),)),))
    ),
    "neither called nor changed": lambda rank: rank_of(rank, step_of(rank, micro_batches=()), final=BEGIN),
    "gets no gradient of job.model()": lambda rank: rank_of(rank, step_of(rank, gradients={}), final=BEGIN),
    "the parameters of a copy": lambda rank: rank_of(rank, step_of(rank, after=BEGIN), final=BEGIN),
    "neither flattened nor copied": lambda rank: rank_of(rank, step_of(rank, gradients={})),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_adapter_is_told_before_the_judge_is_heard(evidence, sentence):
    """The judge's findings on such evidence are not about the trainer."""
    verdict = diagnose(evidence(WRONG[sentence], findings=[Finding("steps", Outcome.ERRORED, "vacuous")]))
    assert verdict.code == 2
    (said,) = verdict.sentences
    assert said.startswith("The adapter is wrong: ")
    assert sentence in said


def test_a_model_that_is_only_evaluated_was_called_all_the_same(evidence):
    evaluated = evidence(lambda rank: rank_of(rank, final=BEGIN, evaluations=(Evaluation(0, 0, (1, 2), False),)))
    assert "the model was evaluated, but no optimizer stepped" in diagnose(evaluated).sentences[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rates": (0.0,)},
        {"skipped": True},
        {"gradients": {name: torch.zeros_like(value) for name, value in BEGIN.items()}},
    ],
)
def test_weights_that_had_no_reason_to_move_do_not_accuse_the_adapter(evidence, changes):
    still = evidence(
        lambda rank: rank_of(rank, step_of(rank, after=BEGIN, **changes), final=BEGIN),
        findings=[Finding("update", Outcome.ERRORED, "vacuous: no weight moved at any step")],
    )
    assert diagnose(still).code == 1


@pytest.mark.parametrize(
    ("outcome", "how"), [(Outcome.ERRORED, "raised"), (Outcome.CRASHED, "died"), (Outcome.TIMED_OUT, "hung")]
)
def test_an_end_that_nobody_knows_is_the_adapter_s(evidence, outcome, how):
    ended = evidence(lambda rank: rank_of(rank, error="ValueError: no"), findings=broken(outcome))
    assert diagnose(ended).code == 2
    (said,) = diagnose(ended).sentences
    assert f"train(job) {how} before the first optimizer step" in said
    assert said.endswith("rank 1: ValueError: no: the launch ended with an error")


def test_it_says_how_far_training_came(evidence):
    ended = evidence(lambda rank: rank_of(rank, step_of(rank), error="no"), findings=broken(Outcome.ERRORED))
    assert "raised after optimizer step 1" in diagnose(ended).sentences[0]


def test_an_end_that_is_known_from_trainers_is_the_trainer_s(evidence):
    exits = {1: Exit(Outcome.TIMED_OUT, "not finished")}
    ended = evidence(findings=broken(Outcome.TIMED_OUT, "collective-not-joined", "sync"))
    ended = replace(ended, trace=replace(ended.trace, ranks=ended.trace.ranks[:1], exits=exits))
    verdict = diagnose(ended)
    assert verdict.code == 1
    assert verdict.sentences[0].startswith("The adapter seems right")


def test_a_rank_that_returns_at_once_lets_the_others_wait(evidence):
    """The judge sees a collective that not all ranks join; the adapter is why a rank never got there."""
    ended = evidence(findings=broken(Outcome.TIMED_OUT, "collective-not-joined", "sync"))
    trace = Trace((rank_of(1, final=None),), {0: Exit(Outcome.TIMED_OUT, "not finished")})
    verdict = diagnose(replace(ended, trace=trace))
    assert verdict.code == 2
    assert "returned on rank 1 without an optimizer step, and the other ranks could not finish." in verdict.sentences[0]


def test_what_only_a_further_cell_raises_at_is_a_false_promise(evidence, cell_of):
    raised = evidence(lambda rank: rank_of(rank, error="no"), findings=broken(Outcome.ERRORED))
    plain = raised.cell
    for further, what in (
        (cell_of("mlp", "ddp", "1x2", "16"), "precision '16'"),
        (cell_of("mlp", "dp", "1x2"), "backend 'dp'"),
    ):
        verdict = refused(diagnose(raised), replace(raised, cell=further), plain)
        assert verdict.code == 2
        assert verdict.sentences[0].startswith(f"The adapter is wrong: it declares {what}")
        assert verdict.sentences[1].startswith("train(job) raised")


def test_what_is_raised_in_the_middle_of_training_is_no_refusal(evidence):
    raised = evidence(lambda rank: rank_of(rank, step_of(rank), error="no"), findings=broken(Outcome.ERRORED))
    assert refused(diagnose(raised), raised, raised.cell) == diagnose(raised)
