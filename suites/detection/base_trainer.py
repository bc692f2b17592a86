"""A right trainer for every workload. Each part of a step is a method, so that a mistake overrides one method."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed
from loop import replicas
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class OptimizerList:
    """Several optimizers that step and zero together."""

    def __init__(self, every):
        self.every = every

    def step(self):
        for optimizer in self.every:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.every:
            optimizer.zero_grad()


class BaseTrainer:
    """Trains one process per device under DistributedDataParallel, or a single process without a group."""

    def __init__(self, job):
        self.job = job
        self.model = job.model()
        self.prepare()
        self.wrapped = self.wrap(self.model)
        self.loader = self.make_loader()
        self.optimizer = self.make_optimizer()
        self.scheduler = job.scheduler(self.optimizer)
        self.scaler = self.make_scaler()

    def prepare(self):
        """Do nothing; a subclass may change the model before it is wrapped."""

    def wrap(self, model):
        if self.job.world_size == 1:
            return model
        torch.distributed.init_process_group(self.job.comm)
        return DistributedDataParallel(model, find_unused_parameters=self.job.unused_parameters)

    def make_loader(self):
        job = self.job
        sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
        return DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)

    def make_scaler(self):
        return self.job.grad_scaler()

    def make_optimizer(self):
        optimizers = self.job.optimizers(self.model.parameters())
        return optimizers[0] if len(optimizers) == 1 else OptimizerList(optimizers)

    def windows(self):
        batches = list(self.loader)
        return [batches[start : start + self.job.accumulate] for start in range(0, len(batches), self.job.accumulate)]

    def divisor(self, window):
        return len(window)

    def forward(self, batch):
        return self.wrapped(batch)

    def loss(self, outputs, batch):
        return self.job.loss(outputs, batch)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def after_micro_batch(self, last):
        """Do nothing."""

    def synchronize(self):
        """Do nothing: DistributedDataParallel averages in the backward."""

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)

    def step(self):
        self.scaler.step(self.optimizer)

    def schedule(self, skipped):
        if not skipped:
            self.scheduler.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            batch = self.job.val_dataset.batch(range(len(self.job.val_dataset)))
            self.report(float(self.job.loss(self.model(batch), batch)))
        self.model.train()

    def report(self, val_loss):
        self.job.log("val_loss", val_loss)

    def micro_batch(self, batch, window, last):
        waits = nullcontext() if last or self.wrapped is self.model else self.wrapped.no_sync()
        with waits:
            with self.job.autocast():
                loss = self.loss(self.forward(batch), batch) / self.divisor(window)
            self.backward(loss)
        self.after_micro_batch(last)

    def end_of_window(self):
        self.synchronize()
        if self.job.clip_norm is not None:
            self.unscale()
            self.clip()
        self.step()
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scheduler is not None:
            self.schedule(skipped=self.scaler.get_scale() < scale)
        self.zero_grad()

    def fit(self):
        for epoch in range(self.job.epochs):
            self.loader.sampler.set_epoch(epoch)
            number = 0
            for window in self.windows():
                for index, batch in enumerate(window, start=1):
                    self.micro_batch(batch, window, last=index == len(window))
                    if index == len(window):
                        self.end_of_window()
                    number += 1
                    if self.job.validate_every and number % self.job.validate_every == 0:
                        self.evaluate()


class ManualAverage(BaseTrainer):
    """Averages gradients, dense or sparse, by hand, and broadcasts buffers before each forward."""

    def wrap(self, model):
        if self.job.world_size > 1:
            torch.distributed.init_process_group(self.job.comm)
        return model

    def forward(self, batch):
        if self.job.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)
        return self.forward_devices(batch)

    def forward_devices(self, batch):
        return self.model(batch)

    def synchronize(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.job.world_size > 1:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad = parameter.grad / self.job.world_size


class DeviceReplicas(ManualAverage):
    """One process for none, dp or ddp2: splits the batch over its devices, and gathers outputs like DataParallel."""

    def forward_devices(self, batch):
        outputs, _ = replicas(self.job, self.model, batch)
        return self.gather(outputs)

    def gather(self, outputs):
        first = outputs[0]
        if isinstance(first, dict):
            return {key: self.gather([output[key] for output in outputs]) for key in first}
        if isinstance(first, tuple):
            return tuple(self.gather(list(column)) for column in zip(*outputs, strict=True))
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
