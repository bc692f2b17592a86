"""A trainer under test: plain DistributedDataParallel, to be replaced by yours piece by piece.

It runs as it is. ``plumbline smoke skeleton.py`` says in a few seconds, after each piece, whether what is wrong is this
file or the trainer in it; ``plumbline run --subject skeleton.py`` is for the whole matrix then.
The page docs/subject-interface.md of Plumbline's documentation has all members of ``job``.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(
    name="my-trainer",
    backends=["ddp"],  # which of none, dp, ddp, ddp2, fsdp, zero it can do; the others are "unsupported", not wrong
    precisions=["32"],  # which of 64, 32, 16, bf16
    capabilities=[],  # what else: "accumulation", "clipping", "scheduler", "validation", "checkpoint", "metrics", …
    # If it is built otherwise: data="iterations" (no epochs: train for job.steps), shuffle="always" or "never",
    # whatever job.shuffle says, buffers="per-rank" (BatchNorm's statistics are not broadcast), max_nodes=1.
)
def train(job):
    """Train ``job``. Each rank calls this in a process of its own, in which torchrun's variables are set."""
    # 1. Ranks. A trainer that starts processes by itself must use these instead: RANK and WORLD_SIZE say so.
    torch.distributed.init_process_group(job.comm)

    # 2. Model and optimizer, the job's. It is the optimizer's steps that are recorded, and job.model()'s weights:
    #    train that very model, wrapped as you like, and no copy of it.
    model = DistributedDataParallel(job.model().to(job.device))
    optimizer = job.optimizer(model.parameters())

    # 3. Data. Every sample once an epoch, each on one rank, in another order each epoch.
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)

    # 4. The loop. The model is called with the whole batch, a dict: its "index" tells which samples are used.
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: column.to(job.device) for name, column in batch.items()}
            with job.autocast():  # does nothing in 32 and 64 bits; 16 needs job.grad_scaler() as well
                loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    # 5. The end. What was recorded is judged, whatever happens from here on.
    torch.distributed.destroy_process_group()
