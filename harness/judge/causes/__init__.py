"""Why a trainer is wrong: explanations that predict what a mistake would have produced, tried against the evidence.

The explanation whose prediction meets the subject's tensors within noise is the cause. Where none fits, the finding
stays unexplained, with its figures. One file a kind of evidence, one entry an explanation.
"""

from __future__ import annotations

from harness.judge.causes.gradients import explain as explain_gradients
from harness.judge.causes.update import explain as explain_update

__all__ = ["explain_gradients", "explain_update"]
