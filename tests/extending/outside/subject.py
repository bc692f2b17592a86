"""A subject: one file, given to ``--subject``."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(name="by-hand", backends=["none", "ddp"], precisions=["32"])
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = torch.nn.parallel.DistributedDataParallel(job.model().to(job.device), job.device_ids)
    optimizer = job.optimizer(model.parameters())
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
    torch.distributed.destroy_process_group()
