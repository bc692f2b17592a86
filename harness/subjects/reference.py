"""The reference trainer under test: used as its documentation says, with nothing quietly replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.subjects.declare import subject
from harness.trainer import Module, Trainer


class _Adapter(Module):
    """The job as a module: the loss is taken where the outputs of all devices of the process are gathered."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job
        self.model: nn.Module = job.model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"outputs": self.model(batch), "batch": batch}

    def training_step_end(self, parts: dict[str, Any]) -> Tensor:
        return self.job.loss(parts["outputs"], parts["batch"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.job.dataset, batch_size=self.job.batch_size, shuffle=self.job.shuffle)


@subject(name="reference", backends=["none", "auto", "dp", "ddp", "ddp2"], precisions=["64", "32", "16", "bf16"])
def train(job: Any) -> None:
    """Train ``job`` with ``harness.Trainer``."""
    backend = None if job.backend in ("none", "auto") else job.backend
    Trainer(
        gpus=job.gpus,
        num_nodes=job.num_nodes,
        distributed_backend=backend,
        accelerator=job.accelerator,
        precision=job.precision,
        max_epochs=job.epochs,
        seed=job.seed,
    ).fit(_Adapter(job))
