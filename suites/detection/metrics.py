"""Figures that are reported and are not true."""

from __future__ import annotations

from expect import known_bad
from loop import ddp, loader

UNSEEN = "job.log is not recorded yet, and no check asks for a metric's true value"


def fit(job, log):
    """Train rightly, and ``log(losses, sizes)`` what each batch of an epoch gave."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        losses, sizes = [], []
        for batch in loader(job, epoch):
            loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            sizes.append(len(batch["index"]))
        log(losses, sizes)


@known_bad("metrics", on=["uneven/ddp/1x2/32"], unseen=UNSEEN)
def mean_of_unequal_batch_means(job):
    """Each batch weighs the same, whatever its size."""
    fit(job, lambda losses, sizes: job.log("loss", sum(losses) / len(losses)))


@known_bad("metrics", on=["mlp/ddp/1x2/32"], unseen=UNSEEN)
def rank_zero_speaks_for_all(job):
    """Rank 0's figure is reported as everybody's."""
    fit(job, lambda losses, sizes: job.log("loss", sum(losses) / len(losses)) if job.rank == 0 else None)
