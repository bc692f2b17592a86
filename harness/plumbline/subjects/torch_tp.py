"""Training with torch's tensor parallelism, as its tutorial does: each rank holds a part of each layer.

https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html. With ``fsdp+tp`` fully_shard divides these parts among
the ranks of the other dimension, with ``ddp+tp`` they are replicated along it, and with ``hsdp+tp`` both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_fsdp import COMPUTES_ON_A_CPU, REFUSED, Fsdp, broadcast_buffers, shard

# GradScaler looks at the gradients of a rank alone, and some of them are parts: no float16.
PRECISIONS = ["64", "32", "bf16"] if COMPUTES_ON_A_CPU else []


@subject(
    name="torch",
    backends=["tp", "ddp+tp", "fsdp+tp", "hsdp+tp"],
    precisions=PRECISIONS,
    capabilities=[name for name in CAPABILITIES if name not in REFUSED],
    library="torch",
)
def train(job):
    fit(job, Tp(job))


class Tp(Fsdp):
    """parallelize_module, and over the other dimension fully_shard or a mean of the gradients."""

    def __init__(self, job):
        if job.device.type == "cuda":
            torch.cuda.set_device(job.device)
        torch.distributed.init_process_group(job.comm)
        torch.manual_seed(job.seed + job.data_rank)  # ranks of one replica draw the same dropout
        mesh = init_device_mesh(job.device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
        self.model = self.bare = parallelized(job.model().to(job.device), mesh["tp"])
        self.sharded, replicated = "shard" in job.mesh, "replicate" in job.mesh
        self.replicas = mesh["replicate"].get_group() if replicated and not self.sharded else None
        if self.sharded:
            self.model = self.bare = shard(self.model, mesh["replicate", "shard"] if replicated else mesh["shard"])
        if job.data_ranks > 1:
            self.model.register_forward_pre_hook(broadcast_buffers, prepend=True)
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return super().backward_of(last) if self.sharded else OneDevice.backward_of(self, last)

    def before_step(self):
        """Average the gradients over the replicas, where no wrapper does."""
        for gradient in self.gradients() if self.replicas else ():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            torch.distributed.all_reduce(local, op=torch.distributed.ReduceOp.AVG, group=self.replicas)

    def clip(self, max_norm):
        clip(self.gradients(), max_norm)

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def clip(gradients, max_norm):
    """Scale gradients to at most this norm of them all; those of one mesh are normed together, as torch asks."""
    by_mesh = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(alike) for alike in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def parallelized(model, mesh):
    """Return the model with its linear layers and embeddings divided over the mesh; ties between layers remain.

    Of two linear layers in a Sequential with pointwise layers between them the first is divided by columns and the
    second by rows, so that nothing travels between them; that needs equal parts. Others are divided by columns, and
    what they return is gathered. A layer of which a rank would have no row remains whole: fully_shard refuses empty
    parts.
    """
    with ties_kept(model):
        parallelize_module(model, mesh, plan_of(model, mesh.size()))
    return model


@contextmanager
def ties_kept(model):
    """Tie layers that share a parameter to each other again, when each of them has been given another one."""
    owners = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((layer, name))
    yield
    for (first, name), *others in owners.values():
        for other, own in others:
            setattr(other, own, getattr(first, name))


def divisible(model, parts):
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    return {name: layer for name, layer in layers.items() if len(layer.weight.chunk(parts)) == parts}


def plan_of(model, parts):
    layers = divisible(model, parts)
    plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in layers}
    # A table of embeddings is divided by rows, as a head that is tied to it is.
    plan |= {
        name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        for name, layer in layers.items()
        if isinstance(layer, nn.Embedding)
    }
    for name, layer in model.named_modules():
        for first, second in pairs(layer, parts) if isinstance(layer, nn.Sequential) else ():
            plan |= {f"{name}.{first}": ColwiseParallel(), f"{name}.{second}": RowwiseParallel()}
    return plan


POINTWISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)


def pairs(sequence: nn.Sequential, parts: int) -> Iterator[tuple[str, str]]:
    """Yield the names of two linear layers with nothing but pointwise layers between them, and equal parts."""
    first = None
    for name, layer in sequence.named_children():
        if isinstance(layer, nn.Linear):
            if first is not None:
                yield first, name
            first = name if first is None and layer.out_features % parts == 0 else None
        elif not isinstance(layer, POINTWISE):
            first = None
