"""``plumbline check --dry-run`` says beforehand what the recorded steps will cost."""

from __future__ import annotations

import sys
from dataclasses import replace

from checked_commands import RIGHT, checked, training

from harness.check.judge.estimate import CostEstimate, estimate_lines
from harness.check.report.terminal import dry_run_screen
from harness.cli.main import main

ONE = CostEstimate(
    2, plain_s=0.5, recorded_s=0.6, replay_s=1.0, parameter_bytes=4096, extra_bytes=2**20, evidence_bytes=10
)


def test_time_memory_and_evidence_are_those_of_all_recorded_steps():
    text = " ".join(estimate_lines(ONE, 4))
    assert "4 recorded steps will take about 6.40 s, in place of 2.00 s" in text
    assert "about 1.00 MiB more on each rank, beside 4.00 KiB of parameters" in text
    assert "10.0 B a rank and step, 80.0 B in the temporary folder" in text


def test_a_screen_has_an_estimate_for_each_training_or_says_why_there_is_none():
    known = replace(training(RIGHT, steps=1), estimate=ONE)
    assert dry_run_screen(checked(known, known), 4).count("DRY RUN: 4 recorded steps") == 2
    assert "did not take" in dry_run_screen(checked(training(RIGHT, steps=1)), 4)
    assert "no Python process" in " ".join(dry_run_screen(checked(), 4).split())


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
    assert main(["check", "--dry-run", "--steps", "3", "--", sys.executable, "-u", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert out.split() == ["0", "1"]
    assert "DRY RUN: 3 recorded steps will take about" in err
    assert list(tmp_path.iterdir()) == [script]
