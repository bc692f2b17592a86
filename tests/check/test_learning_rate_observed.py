"""Learning rates and schedules: equal on all ranks, and one scheduler step per optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from observed_steps import loss_of, recorded, recorded_on_ranks, small_model
from torch.optim import lr_scheduler

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.learning_rate import judge_learning_rate
from plumbline.check.judge.precision_used import judge_precision_used
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(optimizer)]),
}


def trained(after_pass: int = 0, after_step: int = 0, micro_batches: int = 2, which: str = "step") -> RecordedTraining:
    """Train with these numbers of scheduler steps after each backward pass and each optimizer step."""

    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        schedule = SCHEDULERS[which](optimizer)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(micro_batches):
                loss_of(model, 10 * step + part).backward()
                if part < micro_batches - 1:
                    for _ in range(after_pass):
                        schedule.step()
            optimizer.step()
            for _ in range(after_step):
                schedule.step()

    return recorded(script)


def findings(training: RecordedTraining) -> list[Finding]:
    return list(judge_learning_rate(training))


def causes(training: RecordedTraining) -> list[str | None]:
    return [finding.cause for finding in findings(training) if finding.outcome.is_bad]


@pytest.mark.parametrize("which", SCHEDULERS)
def test_a_schedule_that_steps_with_the_optimizer_is_right(which):
    (finding,) = findings(trained(after_step=1, which=which))
    assert finding.outcome is Outcome.PASSED


@pytest.mark.parametrize("which", SCHEDULERS)
def test_a_schedule_that_steps_with_every_micro_batch_may_be_made_for_them(which):
    found = findings(trained(after_pass=1, after_step=1, which=which))
    assert {finding.outcome for finding in found} == {Outcome.PASSED}
    assert any("steps with every micro-batch" in finding.message for finding in found)


def test_several_steps_in_one_place_are_information():
    found = findings(trained(after_step=2))
    assert {finding.outcome for finding in found} == {Outcome.PASSED}
    assert any("stepped 2 times" in finding.message for finding in found)


def test_a_schedule_that_never_steps_is_information():
    found = findings(trained())
    assert {finding.outcome for finding in found} == {Outcome.PASSED}
    assert any("did not step" in finding.message for finding in found)


def test_a_plateau_is_a_schedule_too():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer)
        for step in range(3):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            schedule.step(loss.detach())

    assert causes(recorded(script)) == []


@pytest.mark.parametrize("by_rank", [True, False])
def test_rates_that_differ_between_ranks_are_found(by_rank):
    def script(rank: int) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            schedule.step(float(-step if by_rank and rank == 0 else step))

    assert causes(recorded_on_ranks(script)) == (["rates-differ"] if by_rank else [])


def test_ranks_with_models_of_their_own_may_have_rates_of_their_own():
    def script(rank: int) -> None:
        model = small_model(6, 5 + rank, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01 * (1 + rank))
        loss_of(model).backward()
        optimizer.step()

    assert causes(recorded_on_ranks(script)) == []


def _autocast(rank: int, on: Callable[[int], bool]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on(rank)):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


def test_the_precision_that_was_used_is_said():
    (finding,) = judge_precision_used(recorded(lambda: _autocast(0, lambda rank: True)))
    assert finding.outcome is Outcome.PASSED
    assert "parameters are float32" in finding.message
    assert "autocast: cpu bfloat16" in finding.message


@pytest.mark.parametrize("everywhere", [True, False])
def test_autocast_on_some_ranks_alone_is_found(everywhere):
    training = recorded_on_ranks(lambda rank: _autocast(rank, lambda rank: everywhere or rank == 0))
    bad = [finding.cause for finding in judge_precision_used(training) if finding.outcome.is_bad]
    assert bad == ([] if everywhere else ["precisions-differ"])


def test_flags_of_torch_are_read_in_either_spelling():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older spelling alone")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        (finding,) = judge_precision_used(recorded(lambda: _autocast(0, lambda rank: False)))
    finally:
        matmul.fp32_precision = before
    assert "“tf32”" in finding.message
