"""A right trainer that stops on request and resumes. A mistake replaces one of its methods."""

from __future__ import annotations

import torch
from loop import loader, wrapped


class Run:
    """One rank's training. ``batches`` counts the batches of the current epoch that are done, the same on all ranks."""

    def __init__(self, job):
        self.job = job
        self.model = wrapped(job)
        self.bare = self.model.module if job.world_size > 1 else self.model
        self.optimizer = job.optimizer(self.bare.parameters())
        self.scheduler, self.scaler = job.scheduler(self.optimizer), job.grad_scaler()
        self.epoch = self.batches = self.steps = 0
        self.file = f"{job.checkpoint_dir}/last.pt"

    def parts(self):
        """Return everything that has a state dict."""
        parts = {"model": self.bare, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def state(self):
        """Return the contents of a checkpoint."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return {**states, "epoch": self.epoch, "batches": self.batches, "steps": self.steps}

    def save(self):
        """Save a checkpoint on rank 0."""
        if self.job.rank == 0:
            torch.save(self.state(), self.file)

    def read(self):
        """Read the checkpoint on every rank."""
        return torch.load(self.file)

    def load(self, saved):
        """Restore a checkpoint. Parts without an entry keep their state; counters without an entry are 0."""
        for name, part in self.parts().items():
            if name in saved:
                part.load_state_dict(saved[name])
        for name in ("epoch", "batches", "steps"):
            setattr(self, name, saved.get(name, 0))

    def draw(self, epoch):
        """Return the epoch's remaining batches; each comes with its number in the epoch, from 1."""
        return list(enumerate(loader(self.job, epoch), start=1))[self.batches :]

    def backward(self, batch, window):
        """Add a micro-batch's gradients to those accumulated so far."""
        with self.job.autocast():
            loss = self.job.loss(self.model(batch), batch) / window
        self.scaler.scale(loss).backward()

    def step(self):
        """Step the optimizer, and the scheduler unless the step was skipped."""
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None and self.scaler.get_scale() >= scale:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self):
        """Train to the end, or stop after ``stop_after_step`` steps."""
        job = self.job
        if job.resume:
            self.load(self.read())
        while self.epoch < job.epochs:
            batches = self.draw(self.epoch)
            for first in range(0, len(batches), job.accumulate):
                window = batches[first : first + job.accumulate]
                for _, batch in window:
                    self.backward(batch, len(window))
                self.batches = window[-1][0]
                self.step()
                if self.steps == job.stop_after_step:
                    self.save()
                    return
            self.epoch, self.batches = self.epoch + 1, 0
