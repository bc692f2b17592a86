"""Mistakes on a real device are found, with the right cause."""

from __future__ import annotations

import textwrap

import pytest
import torch

pytestmark = pytest.mark.cuda

TRAINER = """
    import torch
    from plumbline import subject

    @subject(name="wrong", backends=["none", "ddp"], precisions=["32"])
    def train(job):
        {before}
        model = job.model().to(job.device)
        if job.world_size > 1:
            torch.distributed.init_process_group(job.comm)
        optimizer = job.optimizer(model.parameters())
        sampler = torch.utils.data.DistributedSampler(
            job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed
        )
        for epoch in range(job.epochs):
            sampler.set_epoch(epoch)
            for batch in torch.utils.data.DataLoader(job.dataset, job.batch_size, sampler=sampler):
                batch = {{name: column.to(job.device) for name, column in batch.items()}}
                job.loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.fixture
def trainer(tmp_path):
    def write(before="pass"):
        file = tmp_path / "wrong.py"
        file.write_text(textwrap.dedent(TRAINER).format(before=before))
        return file

    return write


def test_the_same_loop_without_its_mistake_is_right(trainer, cuda_cell, wrong):
    assert not wrong(trainer(), cuda_cell("wrong", "mlp", "none", "1x1"))


def test_tf32_is_no_32_bits(trainer, cuda_cell, wrong):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 came with compute capability 8.0")
    found = wrong(trainer("torch.backends.cuda.matmul.allow_tf32 = True"), cuda_cell("wrong", "mlp", "none", "1x1"))
    assert any("computed-in-tf32" in check for check in found), found


def test_a_training_on_the_cpu_is_none_on_cuda(trainer, cuda_cell, wrong):
    found = wrong(trainer("job.device = torch.device('cpu')"), cuda_cell("wrong", "mlp", "none", "1x1"))
    assert [*found] == ["launch trained-on-another-device"]


def test_gradients_that_were_never_averaged(trainer, cuda_cell, wrong):
    found = wrong(trainer(), cuda_cell("wrong", "mlp", "ddp", "1x2"), oversubscribe=True)
    assert any(check.startswith("gradients ") for check in found), found
