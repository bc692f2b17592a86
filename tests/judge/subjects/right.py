"""The trainer that is right, line by line a method, so that a wrong one is the line that is wrong."""

from __future__ import annotations

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject

PRECISIONS = ("64", "32", "16", "bf16")


class Trainer:
    """One process a device, averaged by DistributedDataParallel."""

    def __init__(self, job):
        self.job = job
        self.join()
        self.model = job.model()
        self.wrapped = self.wrap(self.model)
        self.sampler = self.make_sampler(job.dataset)
        self.loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=self.sampler)
        self.scaler = self.make_scaler()
        self.optimizer = self.make_optimizer()

    def join(self):
        torch.distributed.init_process_group(self.job.comm)

    def wrap(self, model):
        return DistributedDataParallel(model)

    def make_sampler(self, dataset):
        job = self.job
        return DistributedSampler(dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)

    def make_scaler(self):
        return self.job.grad_scaler()

    def make_optimizer(self):
        return self.job.optimizer(self.model.parameters())

    def begin_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def forward(self, batch):
        return self.wrapped(batch)

    def loss(self, outputs, batch):
        return self.job.loss(outputs, batch)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def synchronize(self):
        """DistributedDataParallel has done it."""

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def fit(self):
        for epoch in range(self.job.epochs):
            self.begin_epoch(epoch)
            for batch in self.loader:
                with self.job.autocast():
                    loss = self.loss(self.forward(batch), batch)
                self.backward(loss)
                self.synchronize()
                self.step()
                self.zero_grad()

    @property
    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]


class ByHand(Trainer):
    """The same, averaged by hand."""

    def wrap(self, model):
        return model

    def forward(self, batch):
        self.broadcast_buffers()
        return super().forward(batch)

    def broadcast_buffers(self):
        for buffer in self.model.buffers():
            torch.distributed.broadcast(buffer, 0)

    def synchronize(self):
        for gradient in self.gradients:
            torch.distributed.all_reduce(gradient)
            gradient /= self.job.world_size


class Replicas(ByHand):
    """One process that may have several devices: none, dp; and ddp2's process of a node."""

    def join(self):
        if self.job.world_size > 1:
            super().join()

    def forward(self, batch):
        self.broadcast_buffers()
        return torch.cat(self.forward_devices(batch))

    def forward_devices(self, batch):
        devices = len(self.job.devices)
        chunks = {name: column.chunk(devices) for name, column in batch.items()}
        outputs = [self.model({name: chunk[0] for name, chunk in chunks.items()})]
        for device in range(1, devices):
            # The other devices' replicas are thrown away, and with them their buffers.
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            part = {name: chunk[device] for name, chunk in chunks.items()}
            outputs.append(torch.func.functional_call(self.model, buffers, (part,)))
        return outputs

    def broadcast_buffers(self):
        if self.job.world_size > 1:
            super().broadcast_buffers()

    def synchronize(self):
        if self.job.world_size > 1:
            super().synchronize()


def declare(name, trainer, backends=("ddp",)):
    """Return ``trainer`` as a subject."""

    @subject(name=name, backends=backends, precisions=PRECISIONS)
    def train(job):
        trainer(job).fit()

    return train
