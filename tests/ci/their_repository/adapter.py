"""Lets Plumbline's suites train with this project's trainer."""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from trainer import Options, Trainer

from plumbline import subject


@subject(name="theirs", backends=["ddp"], precisions=["32"])
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = job.model().to(job.device)
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    optimizer = job.optimizer(model.parameters())

    def loss(forward, batch):
        batch = batch.to(job.device)
        return job.loss(forward(batch), batch)

    trainer = Trainer(model, optimizer, loss, Options())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        trainer.fit(DataLoader(job.dataset, job.batch_size, sampler=sampler))
    torch.distributed.destroy_process_group()
