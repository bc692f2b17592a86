"""Losses and layers that couple a batch's samples, put together wrongly over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import known_bad
from loop import alone, average, ddp, loader, replicas
from torch import nn
from torch.nn.functional import cross_entropy

CONTRASTIVE = ["contrastive/ddp/1x2/32", "contrastive/ddp/1x3/64", "contrastive/ddp/2x2/bf16"]
BATCHNORM = ["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"]
TEMPERATURE = 0.5


def gather(outputs):
    """Return all ranks' outputs, this rank's own with its graph, the others' without."""
    everybody = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, outputs.detach())
    everybody[dist.get_rank()] = outputs
    return torch.cat(everybody)


@known_bad("batch-coupling", on=CONTRASTIVE)
def negatives_gathered_without_gradient(job):
    """The loss sees all ranks' outputs, and only this rank's own send a gradient back."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            first, second = gather(model(batch)).unbind(1)
            similarity = first @ second.T / TEMPERATURE
            cross_entropy(similarity, torch.arange(len(similarity))).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", on=CONTRASTIVE)
def own_rows_against_gathered_columns(job):
    """Each rank compares its own samples with everybody's, which were gathered without a gradient."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs = model(batch)
            similarity = outputs[:, 0] @ gather(outputs[:, 1].contiguous()).T / TEMPERATURE
            target = torch.arange(len(outputs)) + job.rank * len(outputs)
            cross_entropy(similarity, target).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", on=CONTRASTIVE)
def targets_without_the_ranks_offset(job):
    """Own samples against everybody's, with targets that count from 0 on every rank."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs = model(batch)
            everybody = torch.cat(dist.nn.functional.all_gather(outputs[:, 1].contiguous()))
            similarity = outputs[:, 0] @ everybody.T / TEMPERATURE
            cross_entropy(similarity, torch.arange(len(outputs))).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", on=["contrastive/dp/1x2/32", "contrastive/dp/1x3/64", "contrastive/ddp2/2x2/32"])
def each_device_its_own_negatives(job):
    """Both dp and ddp2 gather the outputs before the loss; here every device takes the loss of its own part."""
    model = ddp(job) if job.world_size > 1 else job.model()
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs, parts = replicas(job, inner, batch)
            losses = [job.loss(output, part) for output, part in zip(outputs, parts, strict=True)]
            (sum(losses) / len(losses)).backward()
            if job.world_size > 1:
                average(job, inner)
            optimizer.step()
            optimizer.zero_grad()


class _CombinedForwardLocalBackward(torch.autograd.Function):
    """SyncBatchNorm whose backward forgot to combine the ranks' sums, as in pytorch#36382."""

    @staticmethod
    def forward(context, x, weight, bias, eps):
        dims = (0, 2, 3)
        sums = torch.stack([x.sum(dims), x.square().sum(dims)])
        dist.all_reduce(sums)
        mean, square = sums / (dist.get_world_size() * x.numel() / x.shape[1])
        scale = (square - mean.square() + eps).rsqrt()
        normal = (x - mean[:, None, None]) * scale[:, None, None]
        context.save_for_backward(normal, weight, scale)
        return normal * weight[:, None, None] + bias[:, None, None]

    @staticmethod
    def backward(context, gradient):
        normal, weight, scale = context.saved_tensors
        dims = (0, 2, 3)
        mean = gradient.mean(dims)  # of this rank's samples; it should be that of all ranks'
        along = (gradient * normal).mean(dims)
        inner = gradient - mean[:, None, None] - normal * along[:, None, None]
        return inner * (weight * scale)[:, None, None], (gradient * normal).sum(dims), gradient.sum(dims), None


@known_bad("batch-coupling", on=BATCHNORM)
def sync_batchnorm_with_a_local_backward(job):
    """Statistics are those of all ranks on the way forward, and those of one on the way back."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: _CombinedForwardLocalBackward.apply(
                x, layer.weight, layer.bias, layer.eps
            )
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", on=BATCHNORM)
def sync_batchnorm_without_gradient(job):
    """The ranks' statistics are averaged outside the graph: nothing flows back through them."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: normalise_by_all_ranks(x, layer)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def normalise_by_all_ranks(x, layer):
    """Normalise with the mean and the variance of all ranks, taken as constants."""
    sums = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))]).detach()
    dist.all_reduce(sums)
    mean, square = sums / dist.get_world_size()
    variance = square - mean.square()
    return nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias, training=False, eps=layer.eps)


@known_bad("batch-coupling", "buffers", on=["cnn-batchnorm/none/1x1/32", *BATCHNORM])
def left_in_evaluation_mode(job):
    """BatchNorm takes its running statistics in the place of the batch's."""
    model = (ddp(job) if job.world_size > 1 else job.model()).eval()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", "buffers", on=BATCHNORM)
def one_rank_in_evaluation_mode(job):
    """Rank 0 evaluates after the first step and goes on in evaluation mode."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model)
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0:
                model.eval()


@known_bad("batch-coupling", "accumulation", on=["cnn-batchnorm/none/1x1/32", "contrastive/none/1x1/64"])
def batch_taken_in_two_halves(job):
    """To save memory the batch is taken in two halves, although its samples depend on each other."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for half in range(2):
                part = {name: column.chunk(2)[half] for name, column in batch.items()}
                (job.loss(model(part), part) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
