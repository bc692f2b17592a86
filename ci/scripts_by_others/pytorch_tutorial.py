"""PyTorch's tutorial ``multigpu_torchrun.py`` under test."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import multigpu_torchrun
from torch.utils.data import StackDataset

from plumbline import subject


@subject(name="pytorch-tutorial", backends=["ddp"], precisions=["64", "32"], shuffle="always", library="torch")
def train(job, script=multigpu_torchrun):
    """Replace what the script loads with the job."""

    def load_train_objs():
        model = job.model()
        return StackDataset(job.dataset, job.dataset), model, job.optimizer(model.parameters())

    script.load_train_objs, script.loss_function = load_train_objs, job.loss
    with TemporaryDirectory() as folder:
        script.main(1, job.epochs, job.batch_size, f"{folder}/snapshot.pt", job.comm)
