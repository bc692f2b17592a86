"""Training with torch's fully_shard (FSDP2), as its tutorial does: each rank holds its share of weights and gradients.

On a mesh of two dimensions that is HSDP: shards within each group of ranks, replicas over the groups.

https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html. Precisions are autocast's. With the tutorial's
MixedPrecisionPolicy weights are cast and buffers are not: BatchNorm, for one, then refuses to compute on a cpu.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, PRECISIONS, OneDevice, fit
from plumbline.subjects.torch_checkpoint import load_parts, save_parts

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

COMPUTES_ON_A_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)

# It reduces neither sparse gradients nor, in one collective, those of parameters that only some ranks have used.
REFUSED = ("sparse-gradients", "unused-parameters")


@subject(
    name="torch",
    backends=["fsdp", "hsdp"],
    precisions={"cuda": PRECISIONS, "cpu": PRECISIONS if COMPUTES_ON_A_CPU else []},
    capabilities=[name for name in CAPABILITIES if name not in REFUSED],
    library="torch",
)
def train(job):
    fit(job, Fsdp(job))


class Fsdp(OneDevice):
    """fully_shard: weights are gathered for a layer's forward and backward, and its gradients averaged into shards."""

    def __init__(self, job):
        if job.device.type == "cuda":
            torch.cuda.set_device(job.device)  # a mesh knows a kind of device, and which of them is said here
        torch.distributed.init_process_group(job.comm)
        # Of two dimensions, weights are sharded along the second, and replicated along the first.
        mesh = init_device_mesh(job.device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
        self.model = self.bare = shard(job.model().to(job.device), mesh)
        self.model.register_forward_pre_hook(broadcast_buffers, prepend=True)
        self.optimizers = job.optimizers(self.model.parameters())  # the shards, which were not there before

    def backward_of(self, last):
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def val_share(self, job):
        """Return all of them: a forward gathers weights, so all ranks need equally many."""
        return range(len(job.val_dataset))

    def save(self, file, others):
        """Write what this rank holds; of ``others``, which all ranks have, one rank writes each."""
        # Of buffers too, whichever rank it is: all of them get those that the next forward would begin with.
        broadcast_buffers(self.model, ())
        save_parts(self.model, self.optimizers, file, others)

    def load(self, file, others):
        return load_parts(self.model, self.optimizers, file, others)


def shard(model, mesh):
    """Return the model with its weights shared out over the mesh, in units that are gathered one at a time."""
    for layer in only_called(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def only_called(model):
    """Yield layers of which nothing but the forward is used, inner ones first: they are gathered one by one.

    The weights of others may be used by the model itself: they are gathered with it.
    """
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.Sequential):
            yield from (layer for layer in module if list(layer.parameters()))


def broadcast_buffers(model, args):
    """Begin a forward with the buffers of rank 0, as DistributedDataParallel does; fully_shard leaves them alone."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
