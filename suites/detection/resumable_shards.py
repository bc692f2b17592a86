"""Right trainers that hold parts, stop where they are told to, and go on with other parts. Mistakes replace a part."""

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
        """Save all that is needed to go on; every rank gives its parts, and rank 0 writes."""
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
        """Take this rank's parts of what was saved; return how far the training is."""
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
        """Return this rank's part of the weights of a parameter."""
        return self.own_part(value, parameter)

    def state_like(self, parameter, value):
        """Return of what the optimizer remembers of a parameter this rank's part, divided as the parameter is."""
        own = self.own_state(value, parameter).clone()
        if not isinstance(parameter, DTensor):
            return own
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False, **shape)

    def own_state(self, value, parameter):
        """Return this rank's part of what the optimizer remembers of a parameter."""
        return self.own_part(value, parameter)

    def own_part(self, value, parameter):
        """Return this rank's part of a tensor that is divided as a parameter is."""
        name, dim = divided(parameter)
        return value if name is None else part(value, dim, self.group(name))

    def old_part(self, value, parameter):
        """Return what the rank of this number had of a tensor before, cut or filled up to what this one has now."""
        name, dim = divided(parameter)
        if name is None:
            return value
        parts = value.chunk(self.saved_mesh[name], dim)
        place = min(self.group(name).rank(), len(parts) - 1)
        return fitted(parts[place], dim, self.own_part(value, parameter).shape[dim])

    def first_part(self, value, parameter):
        """Return what the first rank has of a tensor, cut or filled up to what this one has."""
        name, dim = divided(parameter)
        if name is None:
            return value
        first = value.chunk(self.group(name).size(), dim)[0]
        return fitted(first, dim, self.own_part(value, parameter).shape[dim])


class ResumableShards(Resumable, Sharded):
    """Goes on with shards of other sizes."""


class ResumableLayers(Resumable, TensorParallel):
    """Goes on with layers that are divided among other ranks."""


class ResumableExperts(Resumable, ExpertParallel):
    """Goes on with other experts on each rank."""


def divided(parameter):
    """Return along which dimension of the mesh, and of itself, a parameter is divided; None where it is whole."""
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
            if placement.is_shard():
                return name, placement.dim
    return None, 0


def fitted(value, dim, size):
    """Return a tensor cut, or filled up with zeros, to a size along a dimension."""
    shape = [*value.shape]
    shape[dim] = size
    result, common = value.new_zeros(shape), min(size, value.shape[dim])
    result.narrow(dim, 0, common).copy_(value.narrow(dim, 0, common))
    return result


def of_all(own):
    """Return the entries of all ranks, of which each may have some."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: value for entries in every for name, value in entries.items()}


def whole(tensor):
    """Return a tensor with all parts; all ranks that hold some must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
