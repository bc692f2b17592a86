"""A right trainer that, on two nodes, waits until a file exists; meanwhile, the test acts on the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


@subject(name="gated", backends=["none", "ddp"], precisions=["32"])
def train(job):
    model = job.model()
    if job.num_nodes > 1:
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
