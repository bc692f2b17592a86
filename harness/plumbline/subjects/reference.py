"""The reference trainer, used as its documentation says."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from plumbline.devices.counting import count
from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.trainer import Module, Trainer
from plumbline.trainer.balanced import stage_training  # noqa: F401 - once here, and not in each forked rank


class _Adapter(Module):
    """The job as a module. It computes the loss from the gathered outputs of the process's devices."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job = job
        # The trainer divides the global batch among stages and their replicas.
        self.batch_size = job.global_batch_size if job.backend == "balanced" else job.batch_size
        self.model: nn.Module = job.model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(batch)

    def training_step_end(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.job.loss(outputs, batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"val_loss": self.job.loss(self.model(batch), batch)}

    def on_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.job.log(name, value)

    def configure_optimizers(self) -> Any:
        # Several optimizers take turns, each with its own training step for the same batch.
        optimizers = self.job.optimizers(self.parameters())
        schedulers = filter(None, map(self.job.scheduler, optimizers))
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        if not self.job.unused_parameters:
            return super().configure_ddp(model, device_ids)
        return DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=True)

    def configure_blocks(self) -> list[nn.Module] | None:
        # A model that is not a plain sequence declares where it can be split.
        declare = getattr(self.model, "configure_blocks", super().configure_blocks)
        blocks: list[nn.Module] | None = declare()
        return blocks

    def while_planning(self) -> AbstractContextManager[None]:
        return self.job.trial()

    def while_staged(self, held: frozenset[str]) -> AbstractContextManager[None]:
        return self.job.holding({name.removeprefix("model.") for name in held})

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.job.dataset, batch_size=self.batch_size, shuffle=self.job.shuffle)

    def val_dataloader(self) -> DataLoader[Any] | None:
        if self.job.validate_every is None:
            return None
        return DataLoader(self.job.val_dataset, batch_size=self.batch_size)


PRECISIONS = ["64", "32", "16", "bf16", "bf16-master"]


@subject(name="reference", backends=["none", "ddp", "balanced"], precisions=PRECISIONS, capabilities=CAPABILITIES)
def train(job: Any) -> None:
    if job.backend == "balanced":
        fit_stages(job)
    else:
        fit(job)


# torch.nn.DataParallel splits batches only over CUDA devices.
@subject(
    name="reference",
    backends=["auto", "dp", "ddp2"],
    precisions={"cpu": PRECISIONS, "cuda": PRECISIONS},
    capabilities=CAPABILITIES,
)
def train_replicas(job: Any) -> None:
    fit(job)


def fit_stages(job: Any) -> None:
    # The numbers of stages and micro-batches are given, so that they do not depend on measured times.
    pipelines = job.global_batch_size // job.batch_size
    fit(job, micro_batches=job.micro_batches * pipelines, stages=job.world_size // pipelines)


def fit(job: Any, **options: Any) -> None:
    backend = None if job.backend in ("none", "auto") else job.backend
    checkpoint = f"{job.checkpoint_dir}/checkpoint.ckpt"
    trainer = Trainer(
        gpus=job.gpus,
        num_nodes=job.num_nodes,
        distributed_backend=backend,
        accelerator=job.accelerator,
        oversubscribe=job.accelerator != "cpu" and (job.comm == "gloo" or count(job.accelerator) < job.gpus),
        precision="bf16" if job.precision == "bf16-master" else job.precision,
        amp_level="O2" if job.precision == "bf16-master" else None,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=job.clip_norm,
        val_check_interval=job.validate_every,
        max_epochs=job.epochs,
        max_steps=job.stop_after_step,
        seed=job.seed,
        **options,
    )
    trainer.fit(_Adapter(job), ckpt_path=checkpoint if job.resume else None)
    if job.stop_after_step is not None:
        trainer.save_checkpoint(checkpoint)
