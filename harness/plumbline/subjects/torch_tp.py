"""Training with torch's tensor parallelism: each rank holds a part of each layer or, with ``sp``, of each sequence.

https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html. With ``fsdp+tp``, fully_shard shards these parts along
the other mesh dimension; with ``ddp+tp``, they are replicated along it; ``hsdp+tp`` does both.

With ``sp``, each rank has all weights and a part of the sequence of each activation. SequenceParallel is for layers
that process each token independently. For other layers, PrepareModuleInput gathers the sequence, and
PrepareModuleOutput splits the outputs, which all ranks have computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_fsdp import COMPUTES_ON_A_CPU, REFUSED, Fsdp, broadcast_buffers, joined_mesh, shard

# No float16: GradScaler checks only the gradients of its own rank, and some of these are only parts.
PRECISIONS = ["64", "32", "bf16", "bf16-true"] if COMPUTES_ON_A_CPU else []


@subject(
    name="torch",
    backends=["tp", "ddp+tp", "fsdp+tp", "hsdp+tp"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES - REFUSED,
    library="torch",
)
def train(job):
    fit(job, Tp(job))


class Tp(Fsdp):
    """parallelize_module, combined with fully_shard or averaged gradients over the other dimensions."""

    def __init__(self, job):
        mesh = joined_mesh(job)
        torch.manual_seed(job.seed + job.data_rank)  # the ranks of a replica draw the same dropout masks
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
        # With ``ddp+tp``, there is no fully_shard that averages gradients over replicas.
        for gradient in self.gradients() if self.replicas else ():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            torch.distributed.all_reduce(local, op=torch.distributed.ReduceOp.AVG, group=self.replicas)

    def clip(self, max_norm):
        clip(self.gradients(), max_norm)

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def clip(gradients, max_norm):
    """Scale gradients to at most this total norm, mesh by mesh, because torch computes norms within one mesh."""
    by_mesh = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(alike) for alike in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def parallelized(model, mesh):
    """Return the model with its linear layers and embeddings divided over the mesh.

    If a Sequential has two linear layers with only pointwise layers between them, the first is divided column-wise and
    the second row-wise, which needs equal parts but no communication between the two. Other linear layers are divided
    column-wise, and their outputs are gathered. A layer with fewer rows than ranks stays whole, because fully_shard
    refuses empty parts.
    """
    with ties_kept(model):
        parallelize_module(model, mesh, plan_of(model, mesh.size()))
    return model


@contextmanager
def ties_kept(model):
    """Restore, after the context, the ties between layers whose shared parameters have been replaced in it."""
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
    # Embeddings are divided by rows, like the weight of a head that is tied to them.
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
    """Yield the names of pairs of linear layers with equal parts and only pointwise layers between them."""
    first = None
    for name, layer in sequence.named_children():
        if isinstance(layer, nn.Linear):
            if first is not None:
                yield first, name
            first = name if first is None and layer.out_features % parts == 0 else None
        elif not isinstance(layer, POINTWISE):
            first = None


@subject(
    name="torch",
    backends=["sp"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES - REFUSED,
    library="torch",
    devices="own",
)
def train_sp(job):
    fit(job, Sp(job))


class Sp(OneDevice):
    """The model with activations split along the sequence."""

    def __init__(self, job):
        self.model = self.bare = divided(job.model().to(job.device), joined_mesh(job)["sp"])
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return implicit_replication()  # tensors that the model creates, such as positions, are the same on all ranks

    def before_step(self):
        # Layers that process each token independently have the gradients of this rank's tokens only.
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    def clip(self, max_norm):
        clip([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None], max_norm)


def divided(model, mesh):
    """Return the model with layers that take parts of a sequence. Its outputs are for the whole sequence."""
    with ties_kept(model):
        for layer in layers(model):
            for style in styles(layer):
                parallelize_module(layer, mesh, style)
    return parallelize_module(
        model, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )


def layers(module):
    for layer in module.children():
        if isinstance(layer, nn.Sequential):
            yield from layers(layer)
        else:
            yield layer


def styles(layer):
    if isinstance(layer, nn.Embedding):  # its inputs are the tokens or positions of the whole sequence
        given = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(-1), use_local_output=False)
        return [given, SequenceParallel(sequence_dim=-1)]
    if not list(layer.children()):
        return [SequenceParallel()]
    return [
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False),
    ]
