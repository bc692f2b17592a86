"""A trainer under test: plain DistributedDataParallel, to be replaced piece by piece with yours.

It runs as it is. After each change, ``plumbline smoke skeleton.py`` says in a few seconds whether this file or the
trainer is wrong. Then run the whole matrix with ``plumbline run --subject skeleton.py``. docs/subject-interface.md
describes all members of ``job``.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(
    name="my-trainer",
    backends=["ddp"],  # what it supports of none, dp, ddp, ddp2, fsdp, zero, …; the others are "unsupported"
    precisions=["32"],  # what it supports of 64, 32, 16, bf16
    capabilities=[],  # "accumulation", "clipping", "scheduler", "validation", "checkpoint", "metrics", …
    # If it works differently: data="iterations" (no epochs; train for job.steps), shuffle="always" or "never"
    # (regardless of job.shuffle), buffers="per-rank" (BatchNorm's statistics are not broadcast), max_nodes=1.
)
def train(job):
    """Train ``job``. Each rank calls this in its own process, where torchrun's environment variables are set."""
    # 1. Ranks. The processes have been started already: RANK and WORLD_SIZE are set.
    torch.distributed.init_process_group(job.comm)

    # 2. Model and optimizer. Plumbline records the optimizer's steps and the weights of job.model(): train that
    #    model, not a copy. You can wrap it.
    model = DistributedDataParallel(job.model().to(job.device))
    optimizer = job.optimizer(model.parameters())

    # 3. Data. Each epoch uses every sample once, on one rank, in a new order.
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)

    # 4. The loop. Call the model with the whole batch, a dict whose "index" shows which samples are used.
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: column.to(job.device) for name, column in batch.items()}
            with job.autocast():  # does nothing in 32 and 64; 16 also needs job.grad_scaler()
                loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    # 5. The end. Plumbline judges what it has recorded up to here.
    torch.distributed.destroy_process_group()
