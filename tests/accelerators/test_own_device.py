"""The suites and ``check`` judge trainings on a custom device type."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_its_module_is_asked_for_everything(run):
    done = run(str(HERE / "asked.py"))
    assert done.returncode == 0, done.stderr


def test_a_subject_that_initialises_it_when_it_is_imported_is_refused(run, tmp_path):
    declared = "from plumbline import subject\n@subject(name='early', backends=['none'])\ndef train(job): pass\n"
    (tmp_path / "early.py").write_text(f"import torch\ntorch.zeros(1, device='own')\n{declared}")
    done = run("-m", "plumbline.cli.main", "smoke", "early.py", "--accelerator", "own")
    assert done.returncode == 2, done.stderr
    assert "early.py starts OWN, which does not survive the fork of the ranks" in done.stdout


def test_ranks_that_share_it_are_judged_as_those_of_any_other_device(run, tmp_path):
    # Two ranks share a device, because torch's Python device guard supports only one.
    options = ["--gpus", "2", "--oversubscribe", "--workloads", "mlp,clipping-tied,dropout", "--precisions", "32"]
    done = run("-m", "plumbline.cli.main", "run", "--accelerator", "own", *options, "--backends", "none,ddp", "-q")
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (tmp_path / "reports" / "latest" / "results.jsonl").read_text().splitlines()]
    (header,) = (line for line in lines if "fingerprint" in line)
    assert (
        header["fingerprint"]["key"] | {"accelerator": "own", "device": "Own Device 1", "device_count": 1}
        == (header["fingerprint"]["key"])
    )
    assert header["simulated"] is False
    judged = {(line["workload"], line["backend"], line["gpus"]) for line in lines if line.get("outcome") == "passed"}
    every = {(name, *place) for name in ("mlp", "clipping-tied", "dropout") for place in (("none", 1), ("ddp", 2))}
    assert every <= judged


STAYS_ON_THE_CPU = """
import torch
from torch.utils.data import DataLoader
from plumbline import subject

@subject(name="elsewhere", backends=["none"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    generator = torch.Generator()
    for epoch in range(job.epochs):
        generator.manual_seed(job.seed + epoch)
        for batch in DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle, generator=generator):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_trainer_that_stays_on_the_cpu_is_not_right_on_it(run, tmp_path):
    (tmp_path / "elsewhere.py").write_text(STAYS_ON_THE_CPU)
    options = ["--gpus", "1", "--workloads", "mlp", "--precisions", "32", "--subject", "elsewhere.py", "-q"]
    done = run("-m", "plumbline.cli.main", "run", "--accelerator", "own", *options)
    assert done.returncode == 1, done.stdout
    assert "trained-on-another-device" in done.stdout
    assert "rank 0 trained on cpu instead of own" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("called", "code", "said"), [("ddp", 0, "RIGHT"), ("inner", 1, "own samples alone")])
def test_check_judges_a_script_on_it(run, called, code, said):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run("-m", "plumbline.cli.main", "check", "--", sys.executable, *torchrun, str(HERE / "script.py"), called)
    assert done.returncode == code, done.stdout + done.stderr
    verdict = " ".join(done.stderr.split())
    assert said in verdict
    assert "judged: 100 % of gradients and 100 % of updates" in verdict


def test_a_replay_draws_what_the_training_drew_on_it(run):
    script = """
import torch
from plumbline.replay.random_state import RandomState, drawn_from
device = torch.device("own", 0)
torch.manual_seed(3)
state = RandomState.now([device])
first, after = torch.rand(4, device="own"), torch.rand(4, device="own")
with drawn_from(state):
    assert torch.equal(torch.rand(4, device="own"), first)
assert not torch.equal(torch.rand(4, device="own"), after)
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
