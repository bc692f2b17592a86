"""Parameters that not every rank uses in every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, known_bad
from loop import alone, average, ddp, loader, train, train_scaled

CELLS = ["unused-parameters/ddp/1x2/32", "unused-parameters/ddp/1x4/64"]


@known_bad(
    "unused-params",
    causes=["unused-and-not-synchronised"],
    on={
        **any_check("unused-at-the-end/ddp/1x2/32", "unused-at-the-end/ddp/1x3/32"),
        "unused-at-the-end/ddp/1x3/32": "gradients",
    },
)
def bucket_left_unreduced_in_the_last_step(job):
    """Does not set ``find_unused_parameters``: in the last step, a bucket is never reduced."""
    model = ddp(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    train_scaled(job, model, optimizer, scaler)


@known_bad("unused-params", causes=["reduction-never-finished"], on=CELLS)
def ddp_not_told_of_unused_parameters(job):
    """Does not set ``find_unused_parameters``: DDP raises at the next forward."""
    model = ddp(job)
    train(job, model)


@known_bad(
    "unused-params",
    causes=["averaged-over-its-users"],
    on={
        **any_check("unused-parameters/ddp/1x3/32", "unused-parameters/ddp/1x4/64"),
        "unused-parameters/ddp/1x3/32": "gradients",
    },
)
def averaged_over_those_that_used_it(job):
    """Divides the sum by the number of ranks that had a gradient instead of the world size."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                users = torch.tensor(float(parameter.grad is not None))
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                dist.all_reduce(users)
                parameter.grad /= max(float(users), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "unused-params",
    causes=["unused-and-not-synchronised"],
    on=["unused-parameters/ddp/1x3/32", "unused-parameters/ddp/1x4/64"],
)
def not_averaged_where_a_rank_has_none(job):
    """Does not average a parameter that some rank did not use: each rank keeps its own gradient."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                users = torch.tensor(float(parameter.grad is not None))
                dist.all_reduce(users)
                if users == job.world_size:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "unused-params",
    causes=["unused-somewhere-stepped-nowhere"],
    on=["unused-parameters/ddp/1x3/32", "unused-parameters/ddp/1x4/64"],
)
def thrown_away_where_a_rank_has_none(job):
    """Does not step a parameter that some rank did not use."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                users = torch.tensor(float(parameter.grad is not None))
                dist.all_reduce(users)
                if users == job.world_size:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= job.world_size
                else:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "unused-params", causes=["stale-where-unused"], on=["unused-parameters/ddp/1x3/32", "unused-parameters/ddp/1x4/64"]
)
def the_last_gradient_used_again(job):
    """Averages the previous step's gradient from a rank that did not use the parameter."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = kept[index].clone() if parameter.grad is None else parameter.grad
                kept[index] = parameter.grad.clone()
            average(job, model)
            optimizer.step()
            optimizer.zero_grad()


THAWED = ["thawed/ddp/1x2/32", "thawed/ddp/1x3/64"]


@known_bad(
    "unused-params",
    causes=["unused-parameter-moved"],
    on={**any_check(*THAWED, "thawed/none/1x1/32"), "thawed/ddp/1x3/32": "gradients"},
)
def zeros_where_there_is_no_gradient(job):
    """Gives a parameter without a gradient zeros, so weight decay changes it."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if job.world_size > 1:
                average(job, model)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("unused-params", "optimizer", causes=["parameter-not-in-optimizer"], on=[*THAWED, "thawed/none/1x1/32"])
def optimizer_of_what_was_trained_at_first(job):
    """Creates the optimizer from the parameters that have a gradient at first, without those that thaw later."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = None
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            used = [parameter for parameter in model.parameters() if parameter.grad is not None]
            for parameter in used if job.world_size > 1 else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            optimizer = optimizer or job.optimizer(used)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("unused-params", "sync", causes=["some-parameters-not-synchronised"], on=THAWED)
def averages_what_was_trained_at_first(job):
    """Averages only parameters that have a gradient in the first step, not those that thaw later."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    averaged = None
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            if averaged is None:
                averaged = [parameter for parameter in model.parameters() if parameter.grad is not None]
            for parameter in averaged:
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad("unused-params", causes=["reduction-never-finished"], on=THAWED)
def ddp_not_told_of_a_layer_that_thaws(job):
    """Does not set ``find_unused_parameters`` for a frozen layer: DDP raises at the next forward."""
    model = ddp(job)
    train(job, model)


@known_bad("unused-params", "sync", causes=["graph-not-static"], on=THAWED)
def ddp_told_that_the_graph_is_static(job):
    """Declares a static graph, although a layer that thaws is used only from the second epoch on."""
    model = ddp(job, static_graph=True)
    train(job, model)
