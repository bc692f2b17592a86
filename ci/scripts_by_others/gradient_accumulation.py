"""Accelerate's ``accumulate`` around a model that returns its own loss, with an evaluation after each epoch.

Written anew after huggingface/accelerate, examples/by_feature/gradient_accumulation.py (Apache-2.0): the same calls in
the same order. Differences: functions replace the downloads, and the evaluation computes the loss.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW


def get_dataloaders(accelerator, batch_size):
    """Return the batches for training and evaluation, as dicts with ``to``."""
    raise NotImplementedError("put your data here")


def get_model():
    """Return a model of transformers: ``model(**batch).loss``."""
    raise NotImplementedError("put your model here")


def get_optimizer(model, lr):
    """Return the optimizer."""
    return AdamW(params=model.parameters(), lr=lr)


def get_scheduler(optimizer, steps):
    """Return a schedule whose rate falls to zero."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


def training_function(config, args):
    """Train on this rank."""
    gradient_accumulation_steps = int(args["gradient_accumulation_steps"])
    accelerator = Accelerator(
        cpu=args["cpu"],
        mixed_precision=args["mixed_precision"],
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    num_epochs = int(config["num_epochs"])
    batch_size = int(config["batch_size"])

    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = get_model()
    model = model.to(accelerator.device)
    optimizer = get_optimizer(model, config["lr"])
    lr_scheduler = get_scheduler(optimizer, len(train_dataloader) * num_epochs)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(batch_size)))
        accelerator.print(f"epoch {epoch}:", torch.cat(losses).mean().item())
    accelerator.end_training()
