"""What training changes on a rank, and how a training is set up from the user's module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from plumbline.trainer.data_sharding import rank_loader
from plumbline.trainer.module import Module
from plumbline.trainer.optimizers import SchedulerConfig, parse_optimizers
from plumbline.trainer.precision_plugins import PrecisionPlugin


@dataclass
class TrainingState:
    """What training changes on a rank.

    ``batches`` is the number of completed batches of the current epoch. ``samples_per_batch`` counts over all ranks,
    None where it is unknown.
    """

    module: Module
    precision: PrecisionPlugin
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[SchedulerConfig] = field(default_factory=list)
    batches: int = 0
    samples_per_batch: int | None = None

    def prepare(self, trainer: Any) -> tuple[Any, Any]:
        """Make the user's optimizers and schedulers, and return this rank's training and validation loaders."""
        train_loader = rank_loader(trainer, self.module.train_dataloader(), training=True)
        val_loader = rank_loader(trainer, self.module.val_dataloader(), training=False)
        self.optimizers, self.schedules = parse_optimizers(self.module.configure_optimizers(), self.module)
        if getattr(train_loader, "batch_size", None):
            self.samples_per_batch = train_loader.batch_size * trainer.plan.data_ranks
        return train_loader, val_loader

    def tensors(self) -> dict[str, Any]:
        """Return the state of module, optimizers and precision; its tensors are those in use, not copies."""
        return {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "precision": self.precision.state_dict(),
        }

    def load_tensors(self, checkpoint: dict[str, Any]) -> None:
        """Load what ``tensors`` returned."""
        self.module.load_state_dict(checkpoint["module"])
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.precision.load_state_dict(checkpoint["precision"])
