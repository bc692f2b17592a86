"""The checks: what is judged about a trace. A check is one function in one file, and one entry here.

It takes a TraceAnalysis and returns a Finding, or None where it does not apply (ranks cannot disagree where there is
one). It raises Vacuous where it could not have failed. An entry may also be added from outside of this package.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.finding import Finding
from harness.judge.checks.buffers import buffers
from harness.judge.checks.checkpoint import checkpoint
from harness.judge.checks.gradients import gradients
from harness.judge.checks.initial_weights import initial_weights
from harness.judge.checks.learning_rate import learning_rate
from harness.judge.checks.metrics import metrics
from harness.judge.checks.precision import precision
from harness.judge.checks.ranks_agree import ranks_agree
from harness.judge.checks.rng import rng
from harness.judge.checks.samples import samples
from harness.judge.checks.skipped_steps import skipped_steps
from harness.judge.checks.steps import steps
from harness.judge.checks.stillness import stillness
from harness.judge.checks.training import training
from harness.judge.checks.update import update
from harness.judge.checks.validation import validation
from harness.judge.trace_analysis import TraceAnalysis

Check = Callable[[TraceAnalysis], Finding | None]

CHECKS: dict[str, Check] = {
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
