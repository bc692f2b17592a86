"""Why a trainer is wrong: explanations that predict what a mistake would have produced, tried against the evidence.

The explanation whose prediction meets the subject's tensors within noise is the cause. Where none fits, the finding
stays unexplained, with its figures. One file a kind of evidence: a wrong gradient is explained by the predictions in
``mistakes``, one file a family; what is counted and not computed (samples, steps, rates, worlds) by hypotheses about
the counts.
"""

from __future__ import annotations

from harness.judge.causes.gradients import explain as explain_gradients
from harness.judge.causes.launch import explain as explain_launch
from harness.judge.causes.learning_rate import explain as explain_learning_rate
from harness.judge.causes.metrics import explain as explain_metrics
from harness.judge.causes.samples import explain as explain_samples
from harness.judge.causes.step_count import explain as explain_steps
from harness.judge.causes.step_count import explain_vacuous
from harness.judge.causes.update import explain as explain_update
from harness.judge.causes.validation import explain as explain_validation
from harness.judge.causes.weights import explain_agreement, explain_initial, explain_stillness

__all__ = [
    "explain_agreement",
    "explain_gradients",
    "explain_initial",
    "explain_launch",
    "explain_learning_rate",
    "explain_metrics",
    "explain_samples",
    "explain_steps",
    "explain_stillness",
    "explain_update",
    "explain_vacuous",
    "explain_validation",
]
