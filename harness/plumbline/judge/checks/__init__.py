"""The checks: what is judged about a trace. A check is one function in one file, and one entry here.

It takes a TraceAnalysis and returns a Finding, or None where it does not apply (ranks cannot disagree where there is
one). It raises Vacuous where it could not have failed. An entry may also be added from outside of this package.
"""

from __future__ import annotations

from collections.abc import Callable

from plumbline.core.finding import Finding
from plumbline.judge.checks.buffers import buffers
from plumbline.judge.checks.checkpoint import checkpoint
from plumbline.judge.checks.gradients import gradients
from plumbline.judge.checks.initial_weights import initial_weights
from plumbline.judge.checks.learning_rate import learning_rate
from plumbline.judge.checks.metrics import metrics
from plumbline.judge.checks.precision import precision
from plumbline.judge.checks.ranks_agree import ranks_agree
from plumbline.judge.checks.rng import rng
from plumbline.judge.checks.samples import samples
from plumbline.judge.checks.skipped_steps import skipped_steps
from plumbline.judge.checks.steps import steps
from plumbline.judge.checks.stillness import stillness
from plumbline.judge.checks.training import training
from plumbline.judge.checks.update import update
from plumbline.judge.checks.validation import validation
from plumbline.judge.trace_analysis import TraceAnalysis

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
