"""A learning rate is a float64 number in every precision: its error is in multiples of float64's rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from plumbline.check.evidence.training import Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.learning_rate import judge_learning_rate
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Trace
from plumbline.judge.causes.learning_rate import LearningRateCase
from plumbline.judge.hypothesis import HYPOTHESES, Hypothesis, Match
from plumbline.workloads import WORKLOADS
from plumbline.workloads.generated import Generated, Recipe

PLAIN = WORKLOADS["mlp"]


@pytest.fixture(scope="module")
def judged(simulation):
    """Return a function that judges a float16 training whose rates at one step were multiplied."""

    def judged(factor, cell):
        trace = simulation.right_trace(PLAIN, cell)
        (rank,) = trace.ranks
        step = rank.steps[1]
        wrong = replace(step, learning_rates=tuple(rate * factor for rate in step.learning_rates))
        steps = (rank.steps[0], wrong, *rank.steps[2:])
        return simulation.judge(replace(trace, ranks=(replace(rank, steps=steps),)), PLAIN, cell)["learning-rate"]

    return judged


@pytest.mark.parametrize(("factor", "errors"), [(1.01, 0.01), (2.0, 1.0)])
def test_an_error_of_a_rate_is_measured_in_its_own_rounding(judged, cell_of, factor, errors):
    found = judged(factor, cell_of("mlp", "none", "1x1", "16"))
    assert found.outcome is Outcome.FAILED
    assert found.error_x_noise / found.limit_x_noise == pytest.approx(errors * 1e12)


def test_a_rate_that_is_no_number_is_wrong(judged, cell_of):
    found = judged(math.nan, cell_of("mlp", "none", "1x1", "16"))
    assert (found.outcome, found.error_x_noise) == (Outcome.FAILED, math.inf)


def test_a_rate_that_went_through_a_few_roundings_is_right(judged, cell_of):
    assert judged(1 + 1e-15, cell_of("mlp", "none", "1x1", "16")).outcome is Outcome.PASSED


class TwoSchedules(Generated):
    """SGD for one weight and Adam for the others, each with a warm-up."""

    name = "two-schedules"
    recipe = Recipe(optimizer="several", schedule="warm-up", steps_per_epoch=2)


@pytest.mark.parametrize("moved", [(True, True), (False, True), (True, False), (False, False)])
def test_each_schedule_may_wait_for_an_optimizer_that_was_held_back(simulation, cell_of, moved):
    assert _held_back(simulation, cell_of, moved).outcome is Outcome.PASSED


def test_a_rate_that_is_neither_the_old_nor_the_next_one_is_wrong(simulation, cell_of):
    assert _held_back(simulation, cell_of, (0.5, True)).outcome is Outcome.FAILED


def _held_back(simulation, cell_of, moved):
    """Judge two steps; the first held one optimizer back. ``moved``: how far each rate advanced."""
    workload, cell = TwoSchedules(), cell_of("two-schedules", "none", "1x1", "32")
    (rank,) = simulation.right_trace(workload, cell).ranks
    optimizers = workload.optimizers(workload.model().parameters())
    schedules = [workload.scheduler(one) for one in optimizers]
    old = [one.get_last_lr()[0] for one in schedules]
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        schedule.step()
    new = [one.get_last_lr()[0] for one in schedules]
    rates = tuple(a + part * (b - a) for a, b, part in zip(old, new, moved, strict=True))
    name = next(iter(rank.steps[0].before))
    first = replace(rank.steps[0], learning_rates=tuple(old), held_back={name: rank.steps[0].gradients[name]})
    steps = (first, replace(rank.steps[1], learning_rates=rates))
    return simulation.judge(Trace((replace(rank, steps=steps),)), workload, cell)["learning-rate"]


def rates_of(simulation, cell_of, change):
    """Judge a training whose rates are ``change`` of the right ones."""
    workload, cell = WORKLOADS["schedule"], cell_of("schedule", "none", "1x1", "32")
    (rank,) = simulation.right_trace(workload, cell).ranks
    optimizer = workload.optimizer(workload.model().parameters())
    schedule, due = workload.scheduler(optimizer), []
    for _ in range(2 * len(rank.steps)):
        due.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    rates = change(due)
    steps = tuple(replace(step, learning_rates=(rate,)) for step, rate in zip(rank.steps, rates, strict=False))
    return simulation.judge(Trace((replace(rank, steps=steps),)), workload, cell)["learning-rate"]


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda due: due[3:], "schedule-ahead-of-the-steps", "3 steps ahead of the optimizer"),
        (lambda due: [due[0], *due[3:]], "schedule-ahead-of-the-steps", "2 steps ahead"),
        (lambda due: [0.0 for _ in due], "rate-zero", "the learning rate is 0 at every step"),
        (lambda due: [2 * rate for rate in due], "rate-scaled", "2 × the workload's rate"),
    ],
)
def test_lost_steps_and_a_rate_of_zero_are_no_scaled_rate(simulation, cell_of, change, cause, words):
    found = rates_of(simulation, cell_of, change)
    assert (found.outcome, found.cause) == (Outcome.FAILED, cause)
    assert words in found.message
    assert ("scales the learning rate" in found.message) == (cause == "rate-scaled")


NO_SCHEDULE = {"schedulers": 0, "schedule": []}


def a_script(*rates):
    """Return the training of a script with these rates, one per rank, at its only step."""
    parameters = (Parameter("weight", (2,), "float32"),)
    steps = [
        RecordedStep(0, 0, parameters, torch.ones(2), (), facts={"learning-rate": {"rates": [rate], **NO_SCHEDULE}})
        for rate in rates
    ]
    return RecordedTraining(tuple(RecordedRank(rank, len(rates), (step,)) for rank, step in enumerate(steps)))


def test_one_cause_explains_the_rates_of_a_subject_and_of_a_script(judged, cell_of, monkeypatch):
    cause = Hypothesis("doubled", "optimizer", lambda case: [Match()], "it is twice as large", "divide it by two", 999)
    monkeypatch.setitem(HYPOTHESES, LearningRateCase, [*HYPOTHESES[LearningRateCase], cause])
    subject = judged(2.0, cell_of("mlp", "none", "1x1", "16"))
    (script,) = (one for one in judge_learning_rate(a_script(0.1, 0.2)) if one.outcome.is_bad)
    assert [one.cause for one in (subject, script)] == ["doubled", "doubled"]
    assert all(one.message.endswith("it is twice as large; divide it by two") for one in (subject, script))
