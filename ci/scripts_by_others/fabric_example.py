"""Lightning's example *build your own trainer*, on Fabric, under test."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import own_trainer
from torch.utils.data import DataLoader

from plumbline import subject

PRECISIONS = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed"}
DECLARED = {"backends": ["ddp"], "precisions": list(PRECISIONS), "capabilities": ["accumulation"], "max_nodes": 1}


class Module(pl.LightningModule):
    """The job's model and loss."""

    def __init__(self, job):
        super().__init__()
        self.job, self.model = job, job.model()
        self.configure_optimizers = lambda: ([job.optimizer(self.parameters())], [])

    def training_step(self, batch, batch_idx):
        return self.job.loss(self.model(batch), batch)

    validation_step = training_step


@subject(name="fabric-example", library="lightning", **DECLARED)
def train(job, script=own_trainer):
    """Pass the job to the trainer as a LightningModule and two loaders."""
    loaders = DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle), DataLoader(job.val_dataset, job.batch_size)
    settings = {"strategy": "ddp", "precision": PRECISIONS[job.precision], "grad_accum_steps": job.accumulate}
    device = {"accelerator": "gpu" if job.accelerator == "cuda" else "cpu", "devices": job.gpus}
    with TemporaryDirectory() as folder:
        trainer = script.MyCustomTrainer(**device, **settings, max_epochs=job.epochs, checkpoint_dir=folder)
        trainer.fit(Module(job), *loaders)
