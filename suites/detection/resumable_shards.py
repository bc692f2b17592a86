"""A right trainer of shards that stops where it is told to, and goes on with another number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_trainer import local, part
from shard_trainer import Sharded
from torch.distributed.tensor import DTensor


class ResumableShards(Sharded):
    """Saves whole tensors. A mistake replaces the one thing that it gets wrong."""

    @property
    def file(self):
        return f"{self.job.checkpoint_dir}/last.pt"

    def fit(self):
        job, epoch, done, steps = self.job, 0, 0, 0
        if job.resume:
            epoch, done, steps = self.load(torch.load(self.file))
        while epoch < job.epochs:
            self.loader.sampler.set_epoch(epoch)
            for window in self.windows()[done:]:
                for place, batch in enumerate(window, start=1):
                    self.micro_batch(batch, window, last=place == len(window))
                self.end_of_window()
                done, steps = done + 1, steps + 1
                if steps == job.stop_after_step:
                    self.save((epoch, done, steps))
                    return
            epoch, done = epoch + 1, 0

    def save(self, progress):
        """Save all that is needed to go on; every rank gives its shards, and rank 0 writes."""
        named = dict(self.model.named_parameters())
        state = {
            "progress": progress,
            "shards": self.job.mesh["shard"],
            "weights": {name: whole(parameter) for name, parameter in named.items()},
            "buffers": dict(self.model.named_buffers()),
            "optimizer": {
                name: {key: whole(value) for key, value in self.optimizer.state[parameter].items()}
                for name, parameter in named.items()
            },
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        if self.job.rank == 0:
            torch.save(state, self.file)
        dist.barrier()

    def load(self, saved):
        """Take this rank's shards of what was saved; return how far the training is."""
        self.load_weights(saved)
        self.load_optimizer(saved)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved["buffers"][name])
        if self.scheduler:
            self.scheduler.load_state_dict(saved["scheduler"])
        for group, rate in zip(self.optimizer.param_groups, saved["rates"], strict=True):
            group["lr"] = rate
        return saved["progress"]

    def load_weights(self, saved):
        for name, parameter in self.model.named_parameters():
            local(parameter.data).copy_(part(saved["weights"][name], 0, self.group("shard")))

    def load_optimizer(self, saved):
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                key: self.shard_of_state(value) if value.shape == parameter.shape else value
                for key, value in saved["optimizer"][name].items()
            }

    def shard_of_state(self, value):
        """Return this rank's shard of what the optimizer remembers of a parameter."""
        return self.as_shard(part(value, 0, self.group("shard")).clone(), value)


def whole(tensor):
    """Return a tensor with all shards; all ranks must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor
