"""``plumbline check --dry-run`` predicts the cost of the recorded steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from checked_commands import RIGHT, checked, training
from jsonschema import Draft202012Validator

from plumbline.check.judge.estimate import CostEstimate, estimate_lines
from plumbline.check.report.json_file import dry_run_json, dry_run_schema
from plumbline.check.report.terminal import dry_run_screen
from plumbline.check.verdict.obstacles import why_no_estimate
from plumbline.cli.main import main

SCHEMA = Draft202012Validator(dry_run_schema())

ONE = CostEstimate(
    2, plain_s=0.5, recorded_s=0.6, replay_s=1.0, parameter_bytes=4096, extra_bytes=2**20, evidence_bytes=10
)


def test_time_memory_and_evidence_are_those_of_all_recorded_steps():
    text = " ".join(estimate_lines(ONE, 4))
    assert "4 recorded steps will take at most about 6.40 s, instead of 2.00 s" in text
    assert "about 1.00 MiB more on each rank, in addition to 4.00 KiB of parameters" in text
    assert "10.0 B per rank and step, 80.0 B in the temporary folder" in text


def test_a_screen_has_an_estimate_for_each_training_or_says_why_there_is_none():
    known = replace(training(RIGHT, steps=1), estimate=ONE)
    assert dry_run_screen(checked(known, known), 4).count("DRY RUN: 4 recorded steps") == 2
    assert "not every rank" in dry_run_screen(checked(training(RIGHT, steps=1)), 4)
    nothing = " ".join(dry_run_screen(checked(), 4).split())
    assert "no Python process" in nothing
    assert "What to do: use Python 3.10 or newer" in nothing


def test_a_script_is_ended_after_a_few_steps(tmp_path, monkeypatch, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(10**9):\n"
        "    model(torch.randn(8, 64)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    print(step)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = ["--", sys.executable, "-u", "train.py"]
    assert main(["check", "--dry-run", "--steps", "3", "--json", "cost.json", *command]) == 0
    out, err = capfd.readouterr()
    assert out.split() == ["0", "1"]
    assert "DRY RUN: 3 recorded steps will take at most about" in err
    written = json.loads((tmp_path / "cost.json").read_text())
    SCHEMA.validate(written)
    (training,) = written["trainings"]
    assert (written["steps"], written["exit_code"], written["obstacle"], training["ranks"]) == (3, 0, None, 1)
    assert training["parameter_bytes"] == 4 * (64 * 64 + 64)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cost.json", script]


def test_an_estimate_that_is_not_there_is_written_with_the_reason():
    checked_command = checked(training(RIGHT, steps=1))
    why = why_no_estimate(checked_command)
    document = json.loads(dry_run_json(checked_command, 4, why, 2))
    SCHEMA.validate(document)
    assert document["trainings"] == []
    assert document["obstacle"] == why == "not every rank of the training took 1 step"


def test_the_document_has_the_figures_of_the_screen():
    document = json.loads(dry_run_json(checked(replace(training(RIGHT, steps=1), estimate=ONE)), 4, None, 0))
    SCHEMA.validate(document)
    (cost,) = document["trainings"]
    assert (cost["seconds"], cost["seconds_without_check"], cost["evidence_bytes"]) == (6.4, 2.0, 80)


@pytest.mark.parametrize(
    "option",
    [["--html", "x.html"], ["--sarif", "x.sarif"], ["--report-dir", "x"], ["--github"]],
    ids=lambda one: one[0],
)
def test_a_form_of_the_verdict_is_refused_before_anything_starts(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "open('started', 'x')"]
    assert main(["check", "--dry-run", *option, "--", *command]) == 4
    assert "--dry-run gives no verdict: remove --html, --sarif, --report-dir and --github" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
