"""The reference trainer's ``TrainLoop``, used as its documentation says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plumbline.subjects.declare import subject
from plumbline.trainer import TrainLoop

CAPABILITIES = ["frozen-parameters", "sparse-gradients", "nested-outputs"]

GPU_MODES = {"none": "single", "dp": "dp", "ddp": "ddp"}


class _Adapter(nn.Module):
    """The job's model, which computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(batch)

    def get_loss(self, batch: dict[str, Tensor], criterion: Any, device: torch.device) -> Tensor:
        batch = {name: column.to(device) for name, column in batch.items()}
        return criterion(self(batch), batch)


PRECISIONS = ["64", "32", "16"]


@subject(name="train-loop", backends=["none", "ddp"], precisions=PRECISIONS, capabilities=CAPABILITIES)
def train(job: Any) -> None:
    model = _Adapter(job.model())
    loop = TrainLoop(
        model,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        None,
        None,
        job.optimizer(model.parameters()),
        job.loss,
        gpu_mode=GPU_MODES[job.backend],
        use_amp=job.precision == "16",
        accelerator=job.accelerator,
        seed=job.seed,
    )
    loop.fit(job.epochs, num_nodes=job.num_nodes, node_rank=job.node_rank, num_gpus=job.gpus)


# torch.nn.DataParallel splits batches only over CUDA devices.
@subject(
    name="train-loop",
    backends=["dp"],
    precisions={"cpu": PRECISIONS, "cuda": PRECISIONS},
    capabilities=CAPABILITIES,
)
def train_replicas(job: Any) -> None:
    train(job)
