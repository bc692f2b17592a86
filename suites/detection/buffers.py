"""Wrong buffers, such as the running statistics of BatchNorm."""

from __future__ import annotations

import torch.distributed as dist
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, sharded, train, wrapped
from otherwise import floating, with_own_buffers

CELLS = ["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"]


@known_bad("buffers", causes=["buffers-not-broadcast"], on=CELLS)
def never_broadcast(job):
    """Never broadcasts buffers, so every rank keeps running statistics of its own samples."""
    model = ddp(job, broadcast_buffers=False)
    train(job, model)


@known_bad(
    "buffers", causes=["buffers-not-broadcast"], on={**any_check(*CELLS), **failing("buffers", "cnn-batchnorm/ddp/1x2")}
)
def averaged_by_hand_without_buffers(job):
    """Averages gradients by hand, but never broadcasts buffers."""
    model = alone(job)
    train(job, model, after_backward=average)


@known_bad("buffers", causes=["buffers-updated-otherwise"], on=[*CELLS, "cnn-batchnorm/none/1x1/32"])
def reset_in_every_epoch(job):
    """Resets running statistics at the start of each epoch."""
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
    """Updates running means again after each step, as a second forward in training mode would."""
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
    """Sums floating-point buffers over the ranks without dividing."""
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
    """Never broadcasts buffers: fully_shard shards weights, and leaves buffers alone."""
    model = sharded(job)
    train(job, model)


@known_bad("buffers", causes=["buffers-broadcast"], on=CELLS, buffers="per-rank")
def own_buffers_broadcast(job):
    """Declares buffers per rank, but lets DistributedDataParallel broadcast them."""
    with_own_buffers(job, model=ddp(job))


@known_bad("buffers", causes=["buffers-averaged"], on=CELLS, buffers="per-rank")
def own_buffers_averaged_once(job):
    """Declares buffers per rank, but averages them over the ranks once, after the third step."""

    def between(model, step):
        if step == 3:
            for buffer in floating(model):
                dist.all_reduce(buffer)
                buffer /= job.world_size

    with_own_buffers(job, between)


@known_bad("buffers", causes=["buffers-updated-otherwise"], on=CELLS, buffers="per-rank")
def own_buffers_set_back(job):
    """Declares buffers per rank, but resets running statistics after the third step."""

    def between(model, step):
        if step == 3:
            for layer in model.modules():
                if hasattr(layer, "reset_running_stats"):
                    layer.reset_running_stats()

    with_own_buffers(job, between)


@known_bad("buffers", causes=["statistics-updated-again"], on=CELLS, buffers="per-rank")
def own_buffers_of_one_rank_updated_twice(job):
    """The last rank updates its running statistics twice a step."""

    def between(model, step):
        if job.rank == job.world_size - 1:
            for buffer in floating(model):
                buffer.mul_(0.9)

    with_own_buffers(job, between)


@known_bad("sync", causes=["not-synchronised"], on=CELLS, buffers="per-rank")
def own_buffers_and_own_gradients(job):
    """Declares buffers per rank, but does not average gradients either."""
    with_own_buffers(job, model=alone(job))
