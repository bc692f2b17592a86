"""Right trainers that look wrong: none of them may be flagged."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from expect import known_good
from loop import alone, average, ddp, loader, replicas, windows
from torch import nn
from torch.nn.functional import cross_entropy

PLAIN = ["mlp/ddp/1x2/32", "mlp/ddp/1x3/64", "mlp/ddp/1x4/bf16", "linear-exact/ddp/1x4/32"]


def fit(job, model):
    """Train as one should."""
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_good(on=PLAIN)
def tiny_buckets(job):
    """A bucket for every parameter, reduced in another order than one large bucket."""
    fit(job, ddp(job, bucket_cap_mb=0.0001))


@known_good(on=[*PLAIN, "mlp/ddp/2x2/16"])
def divided_before_the_sum(job):
    """Each rank divides its part, the parts are gathered and added from the last rank to the first."""
    model = alone(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                parts = [torch.empty_like(parameter) for _ in range(job.world_size)]
                dist.all_gather(parts, parameter.grad / job.world_size)
                parameter.grad = sum(reversed(parts))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_good(on=PLAIN)
def loss_divided_gradients_summed(job):
    """The loss is divided by the world size, and gradients are added: the mean all the same."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch) / job.world_size
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=PLAIN)
def gradients_are_views_of_the_buckets(job):
    """``gradient_as_bucket_view`` and a static graph: gradients are overwritten in the next step."""
    fit(job, ddp(job, gradient_as_bucket_view=True, static_graph=True))


@known_good(on=["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"], deviates=True)
def buffers_differ_after_the_forward(job):
    """Plain BatchNorm: statistics per replica, and buffers that are broadcast at the next forward only."""
    fit(job, ddp(job))


@known_good(on=["cnn-batchnorm/dp/1x2/32", "cnn-batchnorm/ddp2/2x2/64"], deviates=True)
def statistics_of_each_replica(job):
    """Dp and ddp2: each device normalises its own chunk, and the loss is that of the gathered outputs."""
    model = ddp(job) if job.world_size > 1 else job.model()
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs, _ = replicas(job, inner, batch)
            job.loss(torch.cat(outputs), batch).backward()
            if job.world_size > 1:
                average(job, inner)
                for buffer in inner.buffers():
                    dist.broadcast(buffer, 0)
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["lm-tokens/ddp/1x2/32", "lm-tokens/ddp/1x3/64", "accumulation-tokens/ddp/1x2/32"], deviates=True)
def mean_of_each_ranks_token_mean(job):
    """Ranks have unequal numbers of tokens, and ddp averages their means: what it promises."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["uneven/ddp/1x2/32", "uneven/ddp/1x3/64", "uneven/ddp/1x4/16"])
def sampler_pads_the_last_batch(job):
    """DistributedSampler repeats at most world-1 samples, so that shares are equal."""
    fit(job, ddp(job))


@known_good(on=["uneven/ddp/1x2/32", "uneven/ddp/1x4/64"], deviates=True)
def uneven_last_batch(job):
    """No padding: ranks have unequal shares of the last batch, and ddp averages their means."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epoch))
        for first in range(0, len(order), job.global_batch_size):
            own = order[first : first + job.global_batch_size][job.rank :: job.world_size]
            batch = job.dataset.batch(own.tolist())
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["mlp/ddp/1x2/16", "mlp/none/1x1/16", "lm-tokens/none/1x1/16"])
def first_steps_skipped(job):
    """A loss scale that is too large at first: the scaler skips steps and halves it."""
    model = ddp(job) if job.world_size > 1 else job.model()
    optimizer, scaler = job.optimizer(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**19)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_good(on=["overflow/ddp/1x2/16", "overflow/ddp/1x3/16", "overflow/none/1x1/16"])
def planned_overflow(job):
    """One rank overflows, and all skip: the infinity went round with the average."""
    fit(job, ddp(job) if job.world_size > 1 else job.model())


@known_good(on=["overflow-schedule/ddp/1x2/16", "overflow-schedule/none/1x1/16"])
def schedule_waits_for_a_skipped_step(job):
    """Where the step is skipped the schedule stands still."""
    model = ddp(job) if job.world_size > 1 else job.model()
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad()


@known_good(on=["accumulation/ddp/1x2/32", "accumulation/ddp/1x3/64", "accumulation/none/1x1/32"])
def synchronised_once_a_window(job):
    """``no_sync`` for all micro-batches but the last: fewer all-reduces, the same average."""
    model = ddp(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                waits = batch is not window[-1] and job.world_size > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["clipping/ddp/1x2/32", "clipping-adamw/ddp/1x3/64", "clipping/none/1x1/32"])
def clipped_by_hand(job):
    """The norm by hand, tensor after tensor, and one factor for all."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            if job.world_size > 1:
                average(job, model)
            norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, job.clip_norm / (float(norm) + 1e-6))
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["contrastive/ddp/1x2/32", "contrastive/ddp/1x3/64"])
def negatives_gathered_with_gradient(job):
    """The loss over all ranks' outputs, differentiated through the gathering: what one device computes."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            first, second = torch.cat(dist.nn.functional.all_gather(model(batch))).unbind(1)
            similarity = first @ second.T / 0.5
            cross_entropy(similarity, torch.arange(len(similarity))).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"])
def sync_batchnorm(job):
    """Statistics of all ranks, forward and backward: what one device computes."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: normalise_over_all_ranks(x, layer)
    fit(job, model)


def normalise_over_all_ranks(x, layer):
    """BatchNorm over all ranks' samples, and its running statistics."""
    moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
    mean, square = dist.nn.functional.all_reduce(moments) / dist.get_world_size()
    variance = square - mean.square()
    count = x.numel() / x.shape[1] * dist.get_world_size()
    with torch.no_grad():
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(variance * count / (count - 1), layer.momentum)
        layer.num_batches_tracked += 1
    normal = (x - mean[:, None, None]) * (variance[:, None, None] + layer.eps).rsqrt()
    return normal * layer.weight[:, None, None] + layer.bias[:, None, None]


@known_good(on=["unused-parameters/ddp/1x2/32", "unused-parameters/ddp/1x4/64", "unused-at-the-end/ddp/1x2/32"])
def unused_parameters_looked_for(job):
    """A parameter that a rank did not use counts as zero there."""
    fit(job, ddp(job, find_unused_parameters=True))


@known_good(on=["mlp/ddp/1x2/32", "mlp/none/1x1/32"])
def gradients_zeroed_in_place(job):
    """Gradients are zeros between steps, not None."""
    model = ddp(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            optimizer.zero_grad(set_to_none=False)
            job.loss(model(batch), batch).backward()
            optimizer.step()


@known_good(on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64"])
def another_permutation(job):
    """A sampler by hand: contiguous shards of a permutation that depends on the epoch alone."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, len(order), job.global_batch_size):
            batch = job.dataset.batch(order[first + job.rank * job.batch_size :][: job.batch_size])
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
