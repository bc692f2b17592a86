"""Right sharded trainers that stop on request and resume with other shards. A mistake overrides one method."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expert_trainer import ExpertParallel
from mesh_trainer import MeshTrainer, local, part
from shard_trainer import Sharded
from tensor_trainer import TensorParallel
from torch.distributed.tensor import DTensor


class Resumable(MeshTrainer):
    """Saves whole tensors, once for all ranks."""

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
                for index, batch in enumerate(window, start=1):
                    self.micro_batch(batch, window, last=index == len(window))
                self.end_of_window()
                done, steps = done + 1, steps + 1
                if steps == job.stop_after_step:
                    self.save((epoch, done, steps))
                    return
            epoch, done = epoch + 1, 0

    def save(self, progress):
        """Save all that is needed to resume: every rank contributes its parts, and rank 0 writes."""
        named = dict(self.model.named_parameters())
        state = {
            "progress": progress,
            "mesh": self.job.mesh,
            "weights": of_all({name: whole(parameter) for name, parameter in named.items()}),
            "buffers": dict(self.model.named_buffers()),
            "optimizer": of_all(
                {
                    name: {key: whole(value) for key, value in self.optimizer.state[parameter].items()}
                    for name, parameter in named.items()
                }
            ),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        if self.job.rank == 0:
            torch.save(state, self.file)
        dist.barrier()

    def load(self, saved):
        """Load this rank's parts of a checkpoint; return the saved progress."""
        self.saved_mesh = saved["mesh"]
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
            local(parameter.data).copy_(self.own_weight(saved["weights"][name], parameter))

    def load_optimizer(self, saved):
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                key: self.state_like(parameter, value) if value.shape == parameter.shape else value
                for key, value in saved["optimizer"][name].items()
            }

    def own_weight(self, value, parameter):
        """Return this rank's part of a parameter's weights."""
        return self.own_part(value, parameter)

    def state_like(self, parameter, value):
        """Return this rank's part of a parameter's optimizer state, divided like the parameter."""
        own = self.own_state(value, parameter).clone()
        if not isinstance(parameter, DTensor):
            return own
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False, **shape)

    def own_state(self, value, parameter):
        """Return this rank's part of a parameter's optimizer state."""
        return self.own_part(value, parameter)

    def own_part(self, value, parameter):
        """Return this rank's part of a tensor that is divided like ``parameter``."""
        name, dim = divided(parameter)
        return value if name is None else part(value, dim, self.group(name))

    def old_part(self, value, parameter):
        """Return the part that this rank had on the saved mesh, cut or padded to the size of its present part."""
        name, dim = divided(parameter)
        if name is None:
            return value
        parts = value.chunk(self.saved_mesh[name], dim)
        place = min(self.group(name).rank(), len(parts) - 1)
        return fitted(parts[place], dim, self.own_part(value, parameter).shape[dim])

    def first_part(self, value, parameter):
        """Return the first rank's part of a tensor, cut or padded to the size of this rank's part."""
        name, dim = divided(parameter)
        if name is None:
            return value
        first = value.chunk(self.group(name).size(), dim)[0]
        return fitted(first, dim, self.own_part(value, parameter).shape[dim])


class ResumableShards(Resumable, Sharded):
    """Resumes with shards of other sizes."""


class ResumableLayers(Resumable, TensorParallel):
    """Resumes with layers that are divided among other ranks."""


class ResumableExperts(Resumable, ExpertParallel):
    """Resumes with other experts on each rank."""


def divided(parameter):
    """Return the mesh dimension and tensor dimension that a parameter is divided along; None and 0 if it is whole."""
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
            if placement.is_shard():
                return name, placement.dim
    return None, 0


def fitted(value, dim, size):
    """Return a tensor cut, or padded with zeros, to ``size`` along a dimension."""
    shape = [*value.shape]
    shape[dim] = size
    result, common = value.new_zeros(shape), min(size, value.shape[dim])
    result.narrow(dim, 0, common).copy_(value.narrow(dim, 0, common))
    return result


def of_all(own):
    """Return the entries of all ranks in one dict."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: value for entries in every for name, value in entries.items()}


def whole(tensor):
    """Return the full tensor; all ranks that hold a part of it must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
