"""Adapters beside frozen weights: in no optimizer, trained apart, on one rank; and frozen weights that move."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, known_bad, known_good
from loop import alone, loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CELLS = ["adapter/ddp/1x2/32", "adapter/ddp/1x3/32"]


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fit(job, model, optimizer, averaged, before_step=lambda: None):
    """Train, and average the gradients of some parameters over the ranks."""
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in averaged:
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            before_step()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=CELLS)
def optimizer_made_before_the_last_adapter(job):
    """Adapters are added layer by layer, and the optimizer was made before the last one was."""
    model = alone(job)
    late = {id(parameter) for parameter in model.last.up.parameters()}
    optimizer = job.optimizer([parameter for parameter in model.parameters() if id(parameter) not in late])
    fit(job, model, optimizer, trainable(model))


@known_bad("sync", causes=["not-synchronised"], on=CELLS)
def wrapped_before_adapters_are_added(job):
    """DDP has the frozen model and one parameter of the loss; adapters come later, and nothing reduces them."""
    model = alone(job)
    wrapped = nn.ModuleList([model])
    known = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    wrapped.probe = nn.Parameter(torch.zeros(()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, known)
    wrapped.forward = lambda batch: model(batch) + 0 * wrapped.probe
    fit(job, DistributedDataParallel(wrapped), job.optimizer(model.parameters()), [])


@known_bad("sync", causes=["some-parameters-not-synchronised"], on=CELLS)
def adapters_of_one_layer_trained_apart(job):
    """What reduces gradients was told of the adapters that there were then."""
    model = alone(job)
    averaged = [parameter for parameter in trainable(model) if parameter is not model.first.up.weight]
    fit(job, model, job.optimizer(model.parameters()), averaged)


@known_bad("optimizer", causes=["frozen-parameter-trained"], on={**any_check(*CELLS)})
def frozen_weights_decay(job):
    """Gradients are zeroed and not removed, and are there for frozen weights as well: AdamW decays these."""
    model = alone(job)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def zeros():
        for parameter in frozen:
            parameter.grad = torch.zeros_like(parameter)

    fit(job, model, job.optimizer(model.parameters()), trainable(model), zeros)


@known_bad("sync", causes=["another-ranks-gradient", "not-synchronised"], on=CELLS)
def adapters_of_the_first_rank(job):
    """Only rank 0 trains adapters: the others take its gradients, and their samples do not count."""
    model = alone(job)

    def take():
        for parameter in trainable(model):
            dist.broadcast(parameter.grad, 0)

    fit(job, model, job.optimizer(model.parameters()), [], take)


@known_good(on=CELLS)
def optimizer_of_adapters_only(job):
    """The optimizer gets what is trainable, and a model of its own averages that."""
    model = alone(job)
    fit(job, model, job.optimizer(trainable(model)), trainable(model))
