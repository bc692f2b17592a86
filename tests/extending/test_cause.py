"""A cause costs one hypothesis, and one call of ``register`` or one line of the registry."""

from __future__ import annotations

from harness.core.outcome import Outcome
from harness.judge.causes import HYPOTHESES, GradientCase, Hypothesis, register


def rolled(case):
    """Predict each parameter's gradient one row too far down."""
    right = case.expected.contract
    for wrong in right:
        yield {name: value.roll(1, 0) if name == wrong else value for name, value in right.items()}


ROLLED = Hypothesis(
    "rolled", "data", rolled, "one row too far down for one parameter", "who moves rows?", specificity=600
)  # fmt: skip


def test_it_explains_what_nothing_explained_before(outside, trained, monkeypatch):
    mistake = outside("mistake")
    finding = trained(mistake, "rolls", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "unexplained")
    monkeypatch.setitem(HYPOTHESES, GradientCase, [*HYPOTHESES[GradientCase]])
    register(GradientCase, ROLLED)
    finding = trained(mistake, "rolls", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, "rolled", "data")
    assert "who moves rows?" in finding.message
