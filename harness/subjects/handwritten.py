"""Training by hand with torch's own DistributedDataParallel, as its tutorial does: the yardstick, and an example."""

from __future__ import annotations

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness.subjects.declare import subject


@subject(name="torch", backends=["none", "ddp"], precisions=["64", "32", "16", "bf16"])
def train(job):
    """Train ``job`` with a loop that one can read from top to bottom."""
    model = job.model().to(job.device)
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        device_ids = [job.device] if job.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    scaler = job.grad_scaler()
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: column.to(job.device) for name, column in batch.items()}
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
