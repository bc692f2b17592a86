"""``plumbline check --every N``: windows of a long training that are judged while it runs."""

from __future__ import annotations

import json
import os
import select
import sys

import pytest

from plumbline.check.command.checked_command import run_and_judge
from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.verdict.windows import WindowJudge
from plumbline.cli.main import main

TRAINING = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range({steps}):
    loss = torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2))
    if step < {mistake}:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("after training")
"""

MORE_MICRO_BATCHES = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(35):
    optimizer.zero_grad()
    for _ in range(1 if step < 14 else 2):
        torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2)).backward()
    optimizer.step()
"""

TWO_OPTIMIZERS = """
import torch

torch.manual_seed(0)
generator, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
first = torch.optim.Adam(generator.parameters(), lr=0.01)
second = torch.optim.Adam(critic.parameters(), lr=0.01)
for step in range(25):
    second.zero_grad()
    fake = generator(torch.randn(5, 3))
    (critic(fake.detach()).square().mean() + critic(torch.randn(5, 4)).sub(1).square().mean()).backward()
    second.step()
    first.zero_grad()
    critic(generator(torch.randn(5, 3))).sub(1).square().mean().backward()
    first.step()
"""

SCHEDULED = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for step in range(35):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2)).backward()
    optimizer.step()
    is_late = step >= 14
    for _ in range({"stops": 0, "hurries": 2}.get(sys.argv[1], 1) if is_late else 1):
        scheduler.step()
    if is_late and sys.argv[1] == "overrides" or step == 14 and sys.argv[1] == "sets once":
        optimizer.param_groups[0]["lr"] = 0.03
"""

RANKS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(100000):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    if step == 23 and dist.get_rank():
        with torch.no_grad():
            model.module.bias.add_(0.01)
"""


def windows_in(text):
    lines = [line for line in text.splitlines() if line.startswith("plumbline step=")]
    return [tuple(part.partition("=")[2] for part in line.split()[1:3]) for line in lines]


def test_one_step_in_ten_is_judged_while_the_training_runs(tmp_path, capfd):
    file = tmp_path / "check.json"
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(steps=35, mistake=99))
    code = main(["check", "--steps", "2", "--every", "10", "--json", str(file), "--", sys.executable, str(script)])
    out, err = capfd.readouterr()
    assert code == 0
    assert "after training" in out
    assert windows_in(err) == [("0", "right"), ("10", "right"), ("20", "right"), ("30", "right")]
    assert "4 of 4 recordings judged while it ran, the last one at step 30" in " ".join(err.split())
    assert [one["step"] for one in json.loads(file.read_text())["windows"]] == [0, 10, 20, 30]


def test_a_mistake_that_begins_later_is_found_in_the_next_window(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(steps=35, mistake=14))
    assert main(["check", "--every", "10", "--", sys.executable, str(script)]) == 1
    out, err = capfd.readouterr()
    assert "after training" in out
    assert windows_in(err) == [("0", "right"), ("10", "right"), ("20", "wrong"), ("30", "wrong")]
    assert "first wrong at step 20, still right at step 10" in " ".join(err.split())
    assert "first at step 20" in err
    assert "took only" not in err


def test_a_note_that_only_later_windows_have_is_printed_once(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(MORE_MICRO_BATCHES)
    assert main(["check", "--every", "10", "--", sys.executable, str(script)]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("plumbline step=")]
    noted = ['note="The gradient is the sum over 2 micro-batches' in line for line in lines]
    assert noted == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ("none", ""),
        ("overrides", "At step 20, the learning rate is 0.03, but a scheduler's is"),
        ("sets once", "but a scheduler's is"),
        ("stops", "The scheduler stepped not at all before step 20, but once before each of the first recorded steps"),
        ("hurries", "The scheduler stepped 2 times before step 20, but once"),
    ],
)
def test_a_schedule_that_takes_another_course_later_is_noted(tmp_path, capfd, change, note):
    script = tmp_path / "train.py"
    script.write_text(SCHEDULED)
    assert main(["check", "--every", "10", "--", sys.executable, str(script), change]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("plumbline step=")]
    assert ["note=" in line for line in lines] == [False, False, bool(note), False]
    assert note in lines[2]


def test_two_optimizers_that_take_turns_are_right_in_every_window(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(TWO_OPTIMIZERS)
    assert main(["check", "--every", "10", "--", sys.executable, str(script)]) == 0
    assert windows_in(capfd.readouterr().err) == [("0", "right"), ("10", "right"), ("20", "right")]


def test_ranks_that_drift_apart_end_the_command_if_asked(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    assert main(["check", "--every", "10", "--stop-when-wrong", "--", *launch]) == 1
    found = windows_in(capfd.readouterr().err)
    assert found[:4] == [("0", "right"), ("10", "right"), ("20", "right"), ("30", "wrong")]


@pytest.mark.parametrize("other", ["--stop", "--dry-run"])
def test_what_ends_the_training_early_is_refused(other, capsys):
    assert main(["check", "--every", "10", other, "--", "true"]) == 4
    assert "--every follows the whole training" in capsys.readouterr().err


def test_the_command_begins_before_its_judge_is_ready(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    has_begun = []

    def judge_in(folder):
        has_begun.extend(select.select([reader], [], [], 60)[0])
        return WindowJudge(folder, 0, print)

    run_and_judge(["sh", "-c", f"echo > {pipe}"], RecordingOptions(), judge_in=judge_in)
    os.close(reader)
    assert has_begun
