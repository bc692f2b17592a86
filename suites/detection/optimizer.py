"""The gradient is right, and what the optimizer or its schedule makes of it is not."""

from __future__ import annotations

import copy

import torch
from expect import known_bad
from loop import ddp, loader, windows

PLAIN = ["mlp/none/1x1/32", "mlp/ddp/1x2/32"]
MOMENTUM = ["cnn-batchnorm/none/1x1/32", "cnn-batchnorm/ddp/1x2/64"]
SCHEDULE = ["schedule/none/1x1/32", "schedule/ddp/1x2/32"]


def wrapped(job):
    """Return the job's model, under DDP if there is more than one rank."""
    return ddp(job) if job.world_size > 1 else job.model()


@known_bad("optimizer", on=["schedule-windows/none/1x1/32", "schedule-windows/ddp/1x2/16"])
def schedule_stepped_for_every_micro_batch(job):
    """The rate decays a window's length too fast."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                with job.autocast():
                    loss = job.loss(model(batch), batch) / len(window)
                scaler.scale(loss).backward()
                if batch is not window[-1]:
                    scheduler.step()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=SCHEDULE)
def schedule_stepped_once_an_epoch(job):
    """The schedule counts epochs."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


@known_bad("optimizer", on=SCHEDULE)
def schedule_never_stepped(job):
    """The schedule is made and forgotten."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=SCHEDULE)
def no_schedule_at_all(job):
    """The schedule is not even made: the rate is the optimizer's own."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=SCHEDULE)
def schedule_stepped_before_the_optimizer(job):
    """The first rate is never used."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            scheduler.step()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=["schedule/ddp/1x2/32", "schedule/ddp/1x3/64"])
def schedule_stepped_once_a_rank(job):
    """The schedule counts the batches of all ranks."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            for _ in range(job.world_size):
                scheduler.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def rate_times_world(job):
    """The rate is raised with the number of ranks, which nobody asked for."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= job.world_size
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def another_rate_on_one_rank(job):
    """Rank 1 has read another rate: same gradients, other weights."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    if job.rank == 1:
        optimizer.param_groups[0]["lr"] /= 2
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=[*PLAIN, *MOMENTUM])
def parameter_missing(job):
    """One parameter is not among those that the optimizer was given: it never moves."""
    model = wrapped(job)
    optimizer = job.optimizer(list(model.parameters())[:-1])
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=PLAIN)
def only_matrices_are_optimised(job):
    """Biases were sorted out, to be given no decay, and are in no group at all."""
    model = wrapped(job)
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.dim() > 1])
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=PLAIN)
def optimizes_a_copy(job):
    """The optimizer holds the parameters of a copy: the model stays where it is."""
    model = wrapped(job)
    copied = copy.deepcopy(model.module if job.world_size > 1 else model)
    optimizer = job.optimizer(copied.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=PLAIN)
def never_steps(job):
    """There is no ``optimizer.step()``."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.zero_grad()


@known_bad("optimizer", on=PLAIN)
def zeroed_before_the_step(job):
    """``zero_grad()`` stands between backward and step."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()


@known_bad("optimizer", on=["mlp/none/1x1/32", "mlp/none/1x1/64", "mlp/ddp/1x3/32"])
def stepped_twice(job):
    """``optimizer.step()`` is called twice for every batch."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=MOMENTUM)
def a_new_optimizer_every_epoch(job):
    """Its state is lost each time."""
    model = wrapped(job)
    for epoch in range(job.epochs):
        optimizer = job.optimizer(model.parameters())
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=[*MOMENTUM, "adam/ddp/1x2/32"])
def another_optimizer(job):
    """Plain SGD in the place of what the workload asks for."""
    model = wrapped(job)
    rate = job.optimizer(model.parameters()).param_groups[0]["lr"]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=[*PLAIN, "adam/ddp/1x2/64"])
def weight_decay_nobody_asked_for(job):
    """A default of the trainer: a decay of a hundredth."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=PLAIN)
def weights_shrink_between_steps(job):
    """Decay is applied by hand, after the step, to all weights."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 0.999


@known_bad("optimizer", on=PLAIN)
def ascends(job):
    """The sign of the loss is the wrong way round."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            (-job.loss(model(batch), batch)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", on=["frozen/none/1x1/32", "frozen/ddp/1x2/32"])
def frozen_layers_thawed(job):
    """``requires_grad`` is switched on for everything."""
    model = job.model().requires_grad_(True)
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
