"""A subject's declarations are stored with its cells, and used to judge them again."""

from __future__ import annotations

import pytest

from plumbline.cli.main import main

SMALL = ("--gpus", "2", "--workloads", "cnn-batchnorm", "--precisions", "32", "--backends", "ddp", "--keep-traces")

TRAINER = """
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(name="apart", backends=["ddp"], {declared})
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = DistributedDataParallel(job.model(), broadcast_buffers=False)
    optimizer = job.optimizer(model.parameters())
    sampler = DistributedSampler(job.dataset, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def apart(project):
    """A project, and a function that writes the trainer with another declaration."""

    def declare(declared):
        (project.root / "apart.py").write_text(TRAINER.format(declared=declared))
        return project

    return declare


def test_a_run_is_judged_again_by_what_was_declared_then(apart, capsys):
    project = apart("buffers='per-rank', max_nodes=1")
    result = project.pytest(*SMALL, "--subject", "apart.py")
    assert {**result.parseoutcomes(), "warnings": 0} == {"deviates": 1, "deselected": 1, "warnings": 0}
    planned = {cell["cell"]: cell["conduct"] for cell in project.run.lines[0]["planned"]}
    assert planned["apart-cnn-batchnorm-ddp-1x2-32"] == {"buffers": "per-rank", "max_nodes": 1}
    (found,) = [one for one in project.run.results if one["check"] == "buffers"]
    assert found["outcome"] == "deviates"
    assert "as the subject declares" in found["message"]
    capsys.readouterr()
    assert main(["judge", str(project.run.path)]) == 0
    assert "1 unchanged, 0 changed" in capsys.readouterr().out

    apart("buffers='shared', max_nodes=1")
    result = project.pytest(*SMALL, "--subject", "apart.py", "--resume")
    assert result.ret == 4
    result.stderr.fnmatch_lines(
        ["*declared {'buffers': 'per-rank', 'max_nodes': 1} in *but declares *now: begin a new run*"]
    )
