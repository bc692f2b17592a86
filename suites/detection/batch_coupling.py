"""Losses and layers that couple the samples of a batch, combined wrongly across ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer, DeviceReplicas
from expect import any_check, failing, known_bad, known_good
from loop import alone, average, ddp, loader, replicas, train, wrapped
from torch import nn
from torch.nn.functional import cross_entropy

CONTRASTIVE = ["contrastive/ddp/1x2/32", "contrastive/ddp/1x3/64", "contrastive/ddp/2x2/bf16"]
BATCHNORM = ["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"]
TEMPERATURE = 0.5


def gather(outputs):
    """Return all ranks' outputs; only this rank's own outputs carry a graph."""
    everybody = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, outputs.detach())
    everybody[dist.get_rank()] = outputs
    return torch.cat(everybody)


@known_bad(
    "batch-coupling",
    causes=["gathered-without-gradient"],
    on={**any_check(*CONTRASTIVE), **failing("gradients", "contrastive/ddp/1x2")},
)
def negatives_gathered_without_gradient(job):
    """Computes the loss of all ranks' outputs, but only this rank's own outputs carry gradients."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            first, second = gather(model(batch)).unbind(1)
            similarity = first @ second.T / TEMPERATURE
            cross_entropy(similarity, torch.arange(len(similarity))).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("batch-coupling", causes=["gathered-without-gradient"], on=CONTRASTIVE)
def own_rows_against_gathered_columns(job):
    """Compares each rank's samples with all ranks' samples, which were gathered without gradients."""
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


@known_bad("batch-coupling", causes=["of-other-samples"], on=CONTRASTIVE)
def targets_without_the_ranks_offset(job):
    """Compares own samples with all ranks' samples, but with targets that start at 0 on every rank."""
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


@known_bad(
    "batch-coupling",
    causes=["each-device-alone"],
    on={
        **any_check("contrastive/dp/1x2/32", "contrastive/dp/1x3/64", "contrastive/ddp2/2x2/32"),
        **failing("gradients", "contrastive/dp/1x2", "contrastive/ddp2/2x2"),
    },
)
def each_device_its_own_negatives(job):
    """Computes a loss per device, although dp and ddp2 gather the outputs before the loss."""
    model = wrapped(job)
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
    """SyncBatchNorm whose backward does not reduce its sums over the ranks, as in pytorch#36382."""

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
        mean = gradient.mean(dims)  # over this rank's samples; it should be over all ranks' samples
        along = (gradient * normal).mean(dims)
        inner = gradient - mean[:, None, None] - normal * along[:, None, None]
        return inner * (weight * scale)[:, None, None], (gradient * normal).sum(dims), gradient.sum(dims), None


@known_bad("batch-coupling", causes=["statistics-shared-forward-only"], on=BATCHNORM)
def sync_batchnorm_with_a_local_backward(job):
    """Normalises with all ranks' statistics in the forward, but with one rank's in the backward."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: _CombinedForwardLocalBackward.apply(
                x, layer.weight, layer.bias, layer.eps
            )
    train(job, model)


@known_bad("batch-coupling", causes=["statistics-shared-forward-only"], on=BATCHNORM)
def sync_batchnorm_without_gradient(job):
    """Averages statistics over the ranks outside the graph, so no gradient flows through them."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: normalise_by_all_ranks(x, layer)
    train(job, model)


def normalise_by_all_ranks(x, layer):
    """Normalise with the mean and variance over all ranks, treated as constants."""
    sums = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))]).detach()
    dist.all_reduce(sums)
    mean, square = sums / dist.get_world_size()
    variance = square - mean.square()
    return nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias, training=False, eps=layer.eps)


@known_bad(
    "batch-coupling",
    "buffers",
    causes=["in-evaluation-mode"],
    on={**any_check("cnn-batchnorm/none/1x1/32", *BATCHNORM), **failing("gradients", "cnn-batchnorm/ddp/1x2")},
)
def left_in_evaluation_mode(job):
    """Trains in evaluation mode: BatchNorm uses its running statistics instead of the batch's."""
    model = (wrapped(job)).eval()
    train(job, model)


@known_bad("batch-coupling", "buffers", causes=["in-evaluation-mode"], on=BATCHNORM)
def one_rank_in_evaluation_mode(job):
    """Rank 0 switches to evaluation mode after the first step, and never switches back."""
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


@known_bad(
    "batch-coupling",
    "accumulation",
    causes=["each-forward-alone"],
    on={
        **any_check("cnn-batchnorm/none/1x1/32", "contrastive/none/1x1/64"),
        **failing("gradients", "contrastive/none/1x1", "cnn-batchnorm/none/1x1", "contrastive/ddp/1x2"),
    },
)
def batch_taken_in_two_halves(job):
    """Splits the batch in two to save memory, although its samples depend on each other."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for half in range(2):
                part = {name: column.chunk(2)[half] for name, column in batch.items()}
                (job.loss(model(part), part) / 2).backward()
            if job.world_size > 1:
                average(job, model)
            optimizer.step()
            optimizer.zero_grad()


class LossOfEachDevice(DeviceReplicas):
    """Computes a loss for each device's part of the batch, and averages these losses."""

    def forward_devices(self, batch):
        return batch

    def loss(self, outputs, batch):
        parts = zip(*(column.chunk(len(self.job.devices)) for column in batch.values()), strict=True)
        losses = [self.job.loss(self.model(part), part) for part in (dict(zip(batch, p, strict=True)) for p in parts)]
        return sum(losses) / len(losses)


@known_bad(
    "batch-coupling",
    "loss-normalisation",
    causes=["each-device-alone"],
    on=failing("gradients", "contrastive/dp/1x2", "lm-tokens/ddp2/2x2"),
)
class DevicesOneAfterAnother(LossOfEachDevice):
    """Wrong here: the samples depend on each other, or the parts have different weights."""


@known_good(on=["mlp/dp/1x2/32"])
class IndependentDevicesOneAfterAnother(LossOfEachDevice):
    """Right here: with independent samples in equal parts, this is the mean over the batch."""


@known_bad(on=failing("gradients", "mlp/dp/1x2"))
class OneDeviceWithoutGradient(DeviceReplicas):
    """Detaches the outputs of all devices but the first."""

    def gather(self, outputs):
        first, *others = outputs
        return super().gather([first, *(output.detach() for output in others)])


@known_bad(on={"nested-outputs/dp/1x3/32": "gradients"})
class ScalarOutputsSummed(DeviceReplicas):
    """Sums 0-d outputs instead of stacking them."""

    def gather(self, outputs):
        joined = super().gather(outputs)
        return joined.sum() if isinstance(joined, torch.Tensor) and not outputs[0].dim() else joined


@known_bad(on={"nested-outputs/dp/1x3/16": "gradients"})
class NestedOutputsWithoutGradient(DeviceReplicas):
    """Detaches nested outputs when it gathers them."""

    def gather(self, outputs):
        joined = super().gather(outputs)
        if isinstance(joined, dict):
            joined["rest"] = torch.utils._pytree.tree_map(torch.Tensor.detach, joined["rest"])
        return joined


@known_bad(on={"transformer/none/1x1/32": "gradients"})
class TiedWeightsSeparated(BaseTrainer):
    """Gives the head a copy of the embedding, so each gets only its own part of the gradient."""

    def prepare(self):
        self.model.head.weight = torch.nn.Parameter(self.model.tokens.weight.detach().clone())
