"""The checks, by the kind of evidence that they judge. A check is one function in one file, and one entry here.

It takes the evidence and returns one Finding, several, or None if it does not apply (a single rank cannot disagree with
another). It raises Vacuous if it could not have failed. The checks of a subject judge a TraceAnalysis;
``plumbline.check.judge`` adds the checks of a script. A check that takes any TrainingRecord judges both.

from plumbline.judge.checks import CHECKS, TrainingRecord
CHECKS[TrainingRecord]["my-check"] = my_check
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from plumbline.core.finding import Finding
from plumbline.evidence.training_record import TrainingRecord
from plumbline.judge.checks.buffers import buffers
from plumbline.judge.checks.checkpoint import checkpoint
from plumbline.judge.checks.gradients import gradients
from plumbline.judge.checks.learning_rate import learning_rate
from plumbline.judge.checks.metrics import metrics
from plumbline.judge.checks.precision import precision
from plumbline.judge.checks.rng import rng
from plumbline.judge.checks.samples import samples
from plumbline.judge.checks.skipped_steps import skipped_steps
from plumbline.judge.checks.training import steps, training
from plumbline.judge.checks.update import update
from plumbline.judge.checks.validation import validation
from plumbline.judge.checks.weights import initial_weights, ranks_agree, stillness
from plumbline.judge.trace_analysis import TraceAnalysis

Check = Callable[[Any], Finding | Iterable[Finding] | None]

CHECKS: defaultdict[type, dict[str, Check]] = defaultdict(dict)

CHECKS[TraceAnalysis] = {
    "steps": steps,
    "samples": samples,
    "initial-weights": initial_weights,
    "rng": rng,
    "ranks-agree": ranks_agree,
    "gradients": gradients,
    "update": update,
    "learning-rate": learning_rate,
    "skipped-steps": skipped_steps,
    "validation": validation,
    "buffers": buffers,
    "stillness": stillness,
    "precision": precision,
    "checkpoint": checkpoint,
    "training": training,
    "metrics": metrics,
}


def checks_of(kind: type) -> dict[str, Check]:
    """Return the checks of a kind of evidence, then those of its base classes."""
    return {name: check for each in kind.__mro__ for name, check in CHECKS.get(each, {}).items()}


__all__ = ["CHECKS", "Check", "TrainingRecord", "checks_of"]
