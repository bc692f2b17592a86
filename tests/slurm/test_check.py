"""`plumbline check -- srun …` on a real cluster: a job step's tasks are one training, and end with the command."""

import json
import signal
import subprocess
import sys
import time

import pytest

TRAIN = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(3):
    optimizer.zero_grad()
    ((model.module if "inner" in sys.argv else model)(torch.randn(4, 6))).square().mean().backward()
    optimizer.step()
print(f"task {rank} of {world}", flush=True)
dist.barrier()
if "fails" in sys.argv:
    sys.exit(7)
if "sleeps" in sys.argv:
    pathlib.Path(sys.argv[1] + "-sleeps").touch()
    time.sleep(600)
dist.destroy_process_group()
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return a function that makes the arguments of a check of two tasks on two nodes."""
    (tmp_path / "evidence").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "evidence"))

    def words(*mode):
        command = ["srun", "--quiet", "-N2", "-n2", sys.executable, tmp_path / "train.py", tmp_path / "store", *mode]
        options = ["--steps", "3", "--json", tmp_path / "verdict.json"]
        return [sys.executable, "-m", "plumbline.cli.main", "check", *map(str, options), "--", *map(str, command)]

    yield words
    assert not list((tmp_path / "evidence").glob("plumbline-*")), "evidence was left behind"


@pytest.mark.parametrize(
    ("mode", "code", "first"),
    [
        ([], 0, "judged in 3 steps on 2 ranks, none wrong"),
        (["inner"], 1, "WRONG: gradients: not synchronised"),
        (["fails"], 2, "NOT JUDGED: the command failed: exit code 7"),
    ],
    ids=["right", "wrong", "fails"],
)
def test_the_tasks_of_a_job_step_are_judged_as_one_training(cluster, words, tmp_path, mode, code, first):
    done = subprocess.run(words(*mode), capture_output=True, text=True, check=False, timeout=600)
    assert first in " ".join(done.stderr.split()), done.stderr
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == ["task 0 of 2", "task 1 of 2"]
    assert json.loads((tmp_path / "verdict.json").read_text())["trainings"][0]["ranks"] == 2


def test_ctrl_c_ends_the_job_step_and_what_it_recorded_is_judged(cluster, words, tmp_path):
    with subprocess.Popen(words("sleeps"), stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "store-sleeps").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=600)[1]
    assert process.returncode == 130, errors
    assert json.loads((tmp_path / "verdict.json").read_text())["trainings"][0]["steps"] == 3
