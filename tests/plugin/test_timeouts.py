"""A subject that hangs repeatedly is given up; one whose teardown hangs is judged, with a note."""

from __future__ import annotations

from plumbline.cli.main import main

HANGING = """
import threading

from plumbline import subject


@subject(name="hanging", backends=["ddp"], precisions=["64", "32", "bf16"])
def train(job):
    threading.Event().wait()
"""

ENDLESS = """
import threading

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(name="endless", backends=["ddp"])
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    sampler = DistributedSampler(job.dataset, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
    torch.distributed.destroy_process_group()
    threading.Event().wait()
"""


def test_a_subject_that_times_out_three_times_in_a_row_is_given_up_in_one_sentence(project):
    (project.root / "hanging.py").write_text(HANGING)
    asked = (
        "--gpus",
        "2",
        "--workloads",
        "mlp",
        "--precisions",
        "64,32,bf16",
        "--backends",
        "ddp",
        "--time-limit",
        "1",
    )
    result = project.pytest(*asked, "--subject", "hanging.py")
    assert result.ret == 1
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] == 3
    assert outcomes["skipped"] == 3
    assert "hanging: 3 cells in a row reached the time limit of 1 s" in result.stderr.str()
    result.stdout.fnmatch_lines(["*INCOMPLETE: 3 of 6 cells without a complete result*"])
    again = project.pytest(*asked, "--subject", "hanging.py", "--resume")
    assert again.parseoutcomes()["failed"] == 6, "three that the run knows, and three more before it is given up again"


def test_a_teardown_that_hangs_is_a_note_beside_the_verdict(project, capsys):
    (project.root / "endless.py").write_text(ENDLESS)
    asked = ("--gpus", "2", "--workloads", "mlp", "--backends", "ddp", "--precisions", "32", "-k", "1x2")
    assert project.pytest(*asked, "--subject", project.trainer("ends.py")).ret == 0
    # The same training without hanging: it takes at most this long here, even on a busier machine.
    limit = str(8 + 5 * project.run.results[0]["seconds"])
    result = project.pytest(*asked, "--time-limit", limit, "--keep-traces", "--subject", "endless.py")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*note on 1 cell of endless*The training was complete*"])
    assert "The training was complete" in (project.run.path / "report.html").read_text()
    assert "The training was complete" in (project.run.path / "report.md").read_text()
    assert {line["outcome"] for line in project.run.results} == {"passed"}
    capsys.readouterr()
    assert main(["judge", str(project.run.path)]) == 0, "judged again, the note stands"
    assert "1 unchanged, 0 changed" in capsys.readouterr().out
