"""Training with torch's sequence parallelism: each rank has all weights and a part of the sequence of each activation.

https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html. SequenceParallel is for layers that compute each
token independently. For other layers, PrepareModuleInput gathers the sequence, and PrepareModuleOutput divides the
outputs, which all ranks have computed.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, OneDevice, fit
from plumbline.subjects.torch_fsdp import REFUSED, joined_mesh
from plumbline.subjects.torch_tp import PRECISIONS, clip, ties_kept


@subject(name="torch", backends=["sp"], precisions=PRECISIONS, capabilities=CAPABILITIES - REFUSED, library="torch")
def train(job):
    fit(job, Sp(job))


class Sp(OneDevice):
    """The model with activations divided along the sequence."""

    def __init__(self, job):
        self.model = self.bare = divided(job.model().to(job.device), joined_mesh(job)["sp"])
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return implicit_replication()  # tensors that the model creates, such as positions, are the same on all ranks

    def before_step(self):
        # Layers that compute each token independently have the gradients of this rank's tokens.
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    def clip(self, max_norm):
        clip([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None], max_norm)


def divided(model, mesh):
    """Return the model with layers that take parts of a sequence, and outputs for the whole sequence."""
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
    if isinstance(layer, nn.Embedding):  # its inputs are all tokens or positions
        given = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(-1), use_local_output=False)
        return [given, SequenceParallel(sequence_dim=-1)]
    if not list(layer.children()):
        return [SequenceParallel()]
    return [
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False),
    ]
