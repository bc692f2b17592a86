"""A cause costs one prediction and one line of ``PREDICTIONS``."""

from __future__ import annotations

from harness.judge.causes.explanation import Explanation

from harness.core.outcome import Outcome
from harness.judge.causes import gradients


def rolled(scene):
    """Predict each parameter's gradient one row too far down."""
    for wrong in scene.truth.contract:
        yield {name: value.roll(1, 0) if name == wrong else value for name, value in scene.truth.contract.items()}


ROLLED = Explanation("rolled", "data", "one row too far down for one parameter", "who moves rows?", rolled)


def test_it_explains_what_nothing_explained_before(outside, trained, monkeypatch):
    mistake = outside("mistake")
    finding = trained(mistake, "rolls", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "unexplained")
    monkeypatch.setattr(gradients, "PREDICTIONS", (*gradients.PREDICTIONS, ROLLED))
    finding = trained(mistake, "rolls", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, "rolled", "data")
    assert finding.message.endswith("who moves rows?")
