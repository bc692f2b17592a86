"""A right trainer that evaluates and reports. A mistake replaces one of its callbacks."""

from __future__ import annotations

import torch
from loop import windows, wrapped


def shared(job, total, count):
    """Return the mean over all ranks' samples; this rank has ``count`` samples that sum to ``total``."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    if job.world_size > 1:
        torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def weighted(job, losses, sizes):
    """Return the mean over all ranks' samples, given this rank's batch losses and batch sizes."""
    return shared(job, sum(loss * size for loss, size in zip(losses, sizes, strict=True)), sum(sizes))


def share(job):
    """Return the ids of this rank's held-out samples."""
    return range(job.rank, len(job.val_dataset), job.world_size)


@torch.no_grad()
def evaluation(job, model, ids, *, data=None):
    """Return the mean loss and the size of each batch of held-out samples."""
    data, ids = data or job.val_dataset, list(ids)
    model.eval()
    losses, sizes = [], []
    for start in range(0, len(ids), job.batch_size):
        batch = data.batch(ids[start : start + job.batch_size])
        with job.autocast():
            losses.append(float(job.loss(model(batch), batch)))
        sizes.append(len(batch["index"]))
    model.train()
    return losses, sizes


def evaluate(job, model):
    """Evaluate each rank's share, and report the mean over all held-out samples."""
    job.log("val_loss", weighted(job, *evaluation(job, model, share(job))))


def nothing(*_):
    """Do nothing."""


def fit(job, *, evaluate=evaluate, before_all=nothing, before_step=nothing, after_step=nothing, after_epoch=nothing,
        due=None):  # fmt: skip
    """Train correctly.

    ``evaluate(job, model)`` runs every ``job.validate_every`` batches, or when ``due(number, last)`` is true.
    ``number`` counts the epoch's batches from 1; ``last`` says whether the batch ends a window. ``before_all(model)``
    runs before training, and ``before_step(model)`` before each step. ``after_step(model, losses, sizes)`` and
    ``after_epoch(losses, sizes)`` get the loss and the size of each batch of the window or epoch.
    """
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    due = due or (lambda number, last: job.validate_every and number % job.validate_every == 0)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    before_all(inner)
    for epoch in range(job.epochs):
        losses, sizes = [], []
        for window in windows(job, epoch):
            for batch in window:
                with job.autocast():
                    loss = job.loss(model(batch), batch)
                scaler.scale(loss / len(window)).backward()
                losses.append(float(loss))
                sizes.append(len(batch["index"]))
                last = batch is window[-1]
                if last:
                    before_step(inner)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    after_step(inner, losses[-len(window) :], sizes[-len(window) :])
                if due(len(losses), last):
                    evaluate(job, inner)
        after_epoch(losses, sizes)
