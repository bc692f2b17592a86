"""The state that training changes on a rank, and its checkpoints, which rank 0 writes and all ranks read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plumbline.trainer.data_sharding import rank_loader
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module
from plumbline.trainer.optimizers import SchedulerConfig, parse_optimizers
from plumbline.trainer.precision_plugins import PrecisionPlugin


@dataclass
class TrainingState:
    """The state that training changes on a rank.

    ``batches`` is the number of completed batches of the current epoch. ``samples_per_batch`` is the batch size over
    all ranks, None if it is unknown.
    """

    module: Module
    precision: PrecisionPlugin
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[SchedulerConfig] = field(default_factory=list)
    batches: int = 0
    samples_per_batch: int | None = None

    def prepare(self, trainer: Any) -> tuple[Any, Any]:
        """Create the user's optimizers and schedulers, and return this rank's training and validation loaders."""
        train_loader = rank_loader(trainer, self.module.train_dataloader(), training=True)
        val_loader = rank_loader(trainer, self.module.val_dataloader(), training=False)
        self.optimizers, self.schedules = parse_optimizers(self.module.configure_optimizers(), self.module)
        if getattr(train_loader, "batch_size", None):
            self.samples_per_batch = train_loader.batch_size * trainer.plan.data_ranks
        return train_loader, val_loader

    def tensors(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "precision": self.precision.state_dict(),
        }

    def load_tensors(self, checkpoint: dict[str, Any]) -> None:
        self.module.load_state_dict(checkpoint["module"])
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.precision.load_state_dict(checkpoint["precision"])


def capture(trainer: Any, state: TrainingState) -> dict[str, Any]:
    """Return a checkpoint of the current state. Its tensors are not copies."""
    return {
        **state.tensors(),
        "schedulers": [schedule.scheduler.state_dict() for schedule in state.schedules],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": state.batches,
        "samples_per_batch": state.samples_per_batch,
        "metrics": dict(trainer.metrics),
    }


def restore(checkpoint: dict[str, Any], trainer: Any, state: TrainingState) -> None:
    """Resume from the checkpoint, even with another number of ranks."""
    found = {name: len(checkpoint[name]) for name in ("optimizers", "schedulers")}
    wanted = {"optimizers": len(state.optimizers), "schedulers": len(state.schedules)}
    if found != wanted or checkpoint["precision"].keys() != state.precision.state_dict().keys():
        raise MisconfigurationError(
            "The checkpoint has different optimizers, schedulers or precision than this training: resume "
            "with the configure_optimizers and the precision that it was written with."
        )
    state.load_tensors(checkpoint)
    for schedule, saved in zip(state.schedules, checkpoint["schedulers"], strict=True):
        schedule.scheduler.load_state_dict(saved)
    restore_progress(checkpoint, trainer)
    state.batches = checkpoint["batches"]
    before, now = checkpoint["samples_per_batch"], state.samples_per_batch
    if before and now and before != now:
        state.batches, rest = divmod(state.batches * before, now)
        if rest:
            raise MisconfigurationError(
                f"The checkpoint was written after {checkpoint['batches']} batches of {before} samples (over all "
                f"ranks). They do not divide into batches of {now} samples: resume with another batch_size."
            )


def restore_progress(checkpoint: dict[str, Any], trainer: Any) -> None:
    trainer.global_step, trainer.current_epoch = checkpoint["global_step"], checkpoint["epoch"]
    trainer.metrics = dict(checkpoint["metrics"])


def write(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write the file atomically: after a crash, the previous file is still there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running any code from it."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint
