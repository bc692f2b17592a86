"""Buffers: what a model remembers besides its weights."""

from __future__ import annotations

import torch.distributed as dist
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, sharded, train, wrapped
from otherwise import floating, with_own_buffers

CELLS = ["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"]


@known_bad("buffers", causes=["buffers-not-broadcast"], on=CELLS)
def never_broadcast(job):
    """Every rank keeps running statistics of its own samples, for ever."""
    model = ddp(job, broadcast_buffers=False)
    train(job, model)


@known_bad(
    "buffers", causes=["buffers-not-broadcast"], on={**any_check(*CELLS), **failing("buffers", "cnn-batchnorm/ddp/1x2")}
)
def averaged_by_hand_without_buffers(job):
    """A trainer that averages gradients by hand and never thinks of buffers."""
    model = alone(job)
    train(job, model, after_backward=average)


@known_bad("buffers", causes=["buffers-updated-otherwise"], on=[*CELLS, "cnn-batchnorm/none/1x1/32"])
def reset_in_every_epoch(job):
    """Running statistics begin anew with each epoch."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for layer in model.modules():
            if hasattr(layer, "reset_running_stats"):
                layer.reset_running_stats()
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("buffers", causes=["statistics-updated-again"], on=[*CELLS, "cnn-batchnorm/none/1x1/32"])
def updated_twice_a_step(job):
    """A second forward in training mode, to log a figure, updates the running statistics again."""
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for layer in inner.features:
                if hasattr(layer, "running_mean"):
                    layer.running_mean.mul_(1 - layer.momentum)


@known_bad("buffers", causes=["buffers-updated-otherwise"], on=CELLS)
def summed_over_the_ranks(job):
    """Floating buffers are added up over the ranks and not divided."""
    model = ddp(job, broadcast_buffers=False)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)


@known_bad("buffers", causes=["buffers-not-broadcast"], on=["cnn-batchnorm/fsdp/1x2/32", "cnn-batchnorm/fsdp/1x3/64"])
def left_alone_by_fully_shard(job):
    """As with ``never_broadcast``: fully_shard shares out weights, and nothing else."""
    model = sharded(job)
    train(job, model)


@known_bad("buffers", causes=["buffers-broadcast"], on=CELLS, buffers="per-rank")
def own_buffers_broadcast(job):
    """It declares buffers of each rank, and DistributedDataParallel broadcasts them as usual."""
    with_own_buffers(job, model=ddp(job))


@known_bad("buffers", causes=["buffers-averaged"], on=CELLS, buffers="per-rank")
def own_buffers_averaged_once(job):
    """Buffers are each rank's own, apart from one average over the ranks in the middle of training."""

    def between(model, step):
        if step == 3:
            for buffer in floating(model):
                dist.all_reduce(buffer)
                buffer /= job.world_size

    with_own_buffers(job, between)


@known_bad("buffers", causes=["buffers-updated-otherwise"], on=CELLS, buffers="per-rank")
def own_buffers_set_back(job):
    """Running statistics begin anew with each epoch."""

    def between(model, step):
        if step == 3:
            for layer in model.modules():
                if hasattr(layer, "reset_running_stats"):
                    layer.reset_running_stats()

    with_own_buffers(job, between)


@known_bad("buffers", causes=["statistics-updated-again"], on=CELLS, buffers="per-rank")
def own_buffers_of_one_rank_updated_twice(job):
    """The last rank moves its statistics twice a step."""

    def between(model, step):
        if job.rank == job.world_size - 1:
            for buffer in floating(model):
                buffer.mul_(0.9)

    with_own_buffers(job, between)


@known_bad("sync", causes=["not-synchronised"], on=CELLS, buffers="per-rank")
def own_buffers_and_own_gradients(job):
    """The declaration is about buffers: gradients are to be averaged all the same, and are not."""
    with_own_buffers(job, model=alone(job))
