"""A check that is not in Plumbline: no optimizer steps with a large gradient."""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS, TrainingRecord


def small_gradients(recording):
    steps = [step for step in recording.optimizer_steps if not step.skipped]
    largest = max(steps, key=lambda step: step.gradient_norm)
    assert largest.parameters
    assert largest.learning_rates
    outcome = Outcome.PASSED if largest.gradient_norm <= 1000 else Outcome.FAILED
    message = f"gradients of {len(steps)} steps"
    return Finding("small-gradients", outcome, message, step=largest.number, rank=largest.rank)


CHECKS[TrainingRecord]["small-gradients"] = small_gradients
