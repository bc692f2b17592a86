"""A training script that a subject starts with torchrun: it asks for its job."""

import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import plumbline

job = plumbline.current_job()
torch.distributed.init_process_group(job.comm)
model = DistributedDataParallel(job.model())
sampler = DistributedSampler(job.dataset, seed=job.seed)
optimizer = job.optimizer(model.parameters())
for epoch in range(job.epochs):
    sampler.set_epoch(epoch)
    for batch in DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler):
        optimizer.zero_grad()
        job.loss(model(batch), batch).backward()
        optimizer.step()
        if sys.argv[1:] and job.rank == job.world_size - 1:
            from starters import WAYS_TO_END

            WAYS_TO_END[sys.argv[1]]()
torch.distributed.destroy_process_group()
