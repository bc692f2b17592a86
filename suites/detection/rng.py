"""Random numbers that should differ between ranks and do not."""

from __future__ import annotations

import torch
from expect import known_bad
from loop import ddp, loader


@known_bad("rng", on=["dropout/ddp/1x2/32"], unseen="every workload's masks follow from the samples: none draws")
def one_seed_on_all_ranks(job):
    """All ranks seed their generators alike, and so drop the same units of different samples."""
    torch.manual_seed(job.seed)
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
