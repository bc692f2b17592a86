"""Accelerate's example ``gradient_accumulation.py`` under test."""

from __future__ import annotations

import gradient_accumulation
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from plumbline import subject

MIXED = {"64": "no", "32": "no", "bf16": "bf16"}
CAPABILITIES = ["accumulation", "scheduler"]


@subject(
    name="accelerate-example", backends=["ddp"], precisions=list(MIXED), capabilities=CAPABILITIES, library="accelerate"
)
def train(job, script=gradient_accumulation):
    """Replace the script's downloads with the job."""
    script.get_dataloaders = lambda accelerator, batch_size: (
        DataLoader(job.dataset, batch_size, shuffle=job.shuffle),
        DataLoader(job.val_dataset, batch_size),
    )
    script.get_model, script.get_optimizer = job.model_with_loss, lambda model, lr: job.optimizer(model.parameters())
    script.get_scheduler = lambda optimizer, steps: job.scheduler(optimizer) or LambdaLR(optimizer, lambda step: 1.0)
    config = {"lr": None, "num_epochs": job.epochs, "batch_size": job.batch_size, "seed": job.seed}
    args = {"cpu": job.accelerator == "cpu", "mixed_precision": MIXED[job.precision]}
    script.training_function(config, args | {"gradient_accumulation_steps": job.accumulate})
