"""A new cause needs one file with a call of ``register``, and is found in a subject and in a script."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn

from plumbline.core.outcome import Outcome
from plumbline.judge.causes import HYPOTHESES, GradientCase, Hypothesis, OracleGradientCase, register

OUTSIDE = Path(__file__).parent / "outside"


def halving_the_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for index in range(3):
            before = [0 if one.grad is None else one.grad.clone() for one in model.parameters()]
            (nn.functional.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 2)) / 3).backward()
            for one, kept in zip(model.parameters(), before, strict=True):
                if index == 2:
                    one.grad = kept + (one.grad - kept) / 2
        optimizer.step()


def mirrored(case):
    """Predict one parameter's gradient with the order of each row reversed."""
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
    monkeypatch.setitem(HYPOTHESES, OracleGradientCase, [*HYPOTHESES[OracleGradientCase]])
    register(OracleGradientCase, MIRRORED)
    finding = trained(mistake, "mirrors", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, "mirrored", "data")
    assert "who turns rows?" in finding.message


def observed(case):
    """Predict the observed gradient itself."""
    yield case.observed


def test_what_was_observed_is_no_prediction_and_explains_nothing(outside, trained, monkeypatch):
    monkeypatch.setitem(HYPOTHESES, OracleGradientCase, [*HYPOTHESES[OracleGradientCase]])
    register(OracleGradientCase, Hypothesis("observed", "data", observed, "what they are", "why?", specificity=600))
    finding = trained(outside("mistake"), "mirrors", "mlp", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "unexplained")


def test_a_cause_stated_over_ranks_and_micro_batches_is_found_in_a_subject(outside, trained, monkeypatch):
    monkeypatch.setitem(HYPOTHESES, GradientCase, [*HYPOTHESES[GradientCase]])
    mistake = outside("halved_last")
    assert trained(mistake, "halves-the-last", "accumulation", "none", "1x1")["gradients"].cause != "last-halved"
    outside("cause")
    finding = trained(mistake, "halves-the-last", "accumulation", "none", "1x1")["gradients"]
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, "last-halved", "accumulation")


def test_the_same_cause_is_found_in_a_script(plumbline, outside, monkeypatch):
    monkeypatch.setitem(HYPOTHESES, GradientCase, [*HYPOTHESES[GradientCase]])
    outside("cause")
    (training,) = plumbline.check(halving_the_last, ranks=1, steps=2).trainings
    (finding,) = (one for one in training.findings if one.outcome is Outcome.FAILED)
    assert (finding.check, finding.cause) == ("gradients", "last-halved")


def test_the_same_cause_is_found_by_the_command(tmp_path):
    script = tmp_path / "train.py"
    source = textwrap.dedent(inspect.getsource(halving_the_last))
    script.write_text(f"import torch\nfrom torch import nn\n\n\n{source}\n\nhalving_the_last()\n")
    (tmp_path / "my_cause.py").write_text((OUTSIDE / "cause.py").read_text())
    command = [sys.executable, "-m", "plumbline.cli.main", "check", "-p", "my_cause", "--", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.lstrip().startswith("WRONG: gradients: last halved")
