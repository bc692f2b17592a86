"""Mistakes with adapters: missing from the optimizer or from the all-reduce, or frozen weights that change."""

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
    """Train; average only the gradients of the parameters in ``averaged`` over the ranks."""
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
    """Creates the optimizer before the last layer's ``up`` matrix is added, so that one is missing."""
    model = alone(job)
    late = {id(parameter) for parameter in model.last.up.parameters()}
    optimizer = job.optimizer([parameter for parameter in model.parameters() if id(parameter) not in late])
    fit(job, model, optimizer, trainable(model))


@known_bad("sync", causes=["not-synchronised"], on=CELLS)
def wrapped_before_adapters_are_added(job):
    """Wraps the frozen model in DDP before the adapters are added, so DDP never reduces them.

    The probe gives DDP the one trainable parameter that it needs.
    """
    model = alone(job)
    wrapped = nn.ModuleList([model])
    known = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    wrapped.probe = nn.Parameter(torch.zeros(()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, known)
    wrapped.forward = lambda batch: model(batch) + 0 * wrapped.probe
    fit(job, DistributedDataParallel(wrapped), job.optimizer(model.parameters()), [])


@known_bad("sync", causes=["some-parameters-not-synchronised"], on=CELLS)
def adapters_of_one_layer_trained_apart(job):
    """Leaves one adapter matrix out of the all-reduce, as if it had been added later."""
    model = alone(job)
    averaged = [parameter for parameter in trainable(model) if parameter is not model.first.up.weight]
    fit(job, model, job.optimizer(model.parameters()), averaged)


@known_bad("optimizer", causes=["frozen-parameter-trained"], on={**any_check(*CELLS)})
def frozen_weights_decay(job):
    """Gives frozen weights gradients of zeros instead of None, so AdamW applies weight decay to them."""
    model = alone(job)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def zeros():
        for parameter in frozen:
            parameter.grad = torch.zeros_like(parameter)

    fit(job, model, job.optimizer(model.parameters()), trainable(model), zeros)


@known_bad("sync", causes=["another-ranks-gradient", "not-synchronised"], on=CELLS)
def adapters_of_the_first_rank(job):
    """Broadcasts rank 0's gradients instead of averaging, so the other ranks' samples do not count."""
    model = alone(job)

    def take():
        for parameter in trainable(model):
            dist.broadcast(parameter.grad, 0)

    fit(job, model, job.optimizer(model.parameters()), [], take)


@known_good(on=CELLS)
def optimizer_of_adapters_only(job):
    """Gives the optimizer only the trainable parameters, and averages only their gradients."""
    model = alone(job)
    fit(job, model, job.optimizer(trainable(model)), trainable(model))
