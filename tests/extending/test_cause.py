"""A cause costs one hypothesis, and one call of ``register`` or one line of the registry."""

from __future__ import annotations

from plumbline.core.outcome import Outcome
from plumbline.judge.causes import HYPOTHESES, GradientCase, Hypothesis, register


def mirrored(case):
    """Predict one parameter's gradient with each row in reverse order."""
    right = case.expected.contract
    for wrong in right:
        yield {name: value.flip(-1) if name == wrong else value for name, value in right.items()}


MIRRORED = Hypothesis(
    "mirrored", "data", mirrored, "in reverse order within a parameter's rows", "who turns rows?", specificity=600
)  # fmt: skip


def test_it_explains_what_nothing_explained_before(outside, trained, monkeypatch):
    mistake = outside("mistake")
    finding = trained(mistake, "mirrors", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "unexplained")
    monkeypatch.setitem(HYPOTHESES, GradientCase, [*HYPOTHESES[GradientCase]])
    register(GradientCase, MIRRORED)
    finding = trained(mistake, "mirrors", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, "mirrored", "data")
    assert "who turns rows?" in finding.message


def observed(case):
    """Predict nothing: what was observed meets itself."""
    yield case.observed


def test_what_was_observed_is_no_prediction_and_explains_nothing(outside, trained, monkeypatch):
    monkeypatch.setitem(HYPOTHESES, GradientCase, [*HYPOTHESES[GradientCase]])
    register(GradientCase, Hypothesis("observed", "data", observed, "what they are", "why?", specificity=600))
    finding = trained(outside("mistake"), "mirrors", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "unexplained")
