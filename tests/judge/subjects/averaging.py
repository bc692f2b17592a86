"""Wrong averages: too much, too little, twice, of the wrong thing."""

from __future__ import annotations

import torch
import torch.distributed
from right import ByHand, Replicas, Trainer, declare
from torch.nn.parallel import DistributedDataParallel


class Sum(ByHand):
    def synchronize(self):
        for gradient in self.gradients:
            torch.distributed.all_reduce(gradient)


class LossTimesWorld(Trainer):
    def backward(self, loss):
        super().backward(loss * self.job.world_size)


class DividedTwice(Trainer):
    def synchronize(self):
        for gradient in self.gradients:
            gradient /= self.job.world_size


class FirstRankOnly(ByHand):
    """What rank 0 found is sent to everybody: all ranks agree."""

    def synchronize(self):
        for gradient in self.gradients:
            torch.distributed.broadcast(gradient, 0)


class ClippedBeforeTheAverage(ByHand):
    def synchronize(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.2 + 0.1 * self.job.rank)
        super().synchronize()


class CompressedToBfloat16(ByHand):
    def synchronize(self):
        for gradient in self.gradients:
            small = gradient.bfloat16()
            torch.distributed.all_reduce(small)
            gradient.copy_(small / self.job.world_size)


class StaleGradient(ByHand):
    """Each step is taken with the average of the step before."""

    last = None

    def synchronize(self):
        super().synchronize()
        now = [gradient.clone() for gradient in self.gradients]
        for gradient, old in zip(self.gradients, self.last or now, strict=True):
            gradient.copy_(old)
        self.last = now


class NeverZeroed(Trainer):
    def zero_grad(self):
        pass


class OneParameterForgotten(ByHand):
    def synchronize(self):
        own = self.gradients[-1].clone()
        super().synchronize()
        self.gradients[-1].copy_(own)


class WithoutSynchronization(Trainer):
    def forward(self, batch):
        return self.wrapped.module(batch)


class InNoSync(Trainer):
    def fit(self):
        with self.wrapped.no_sync():
            super().fit()


class ReplicasTakeTheirOwnLoss(Replicas):
    """dp and ddp2 as if each device had a loss of its own: the mean of the devices' losses."""

    def forward(self, batch):
        self.outputs = self.forward_devices(batch)
        return self.outputs

    def loss(self, outputs, batch):
        chunks = {name: column.chunk(len(outputs)) for name, column in batch.items()}
        losses = [
            self.job.loss(output, {name: chunk[device] for name, chunk in chunks.items()})
            for device, output in enumerate(outputs)
        ]
        return sum(losses) / len(losses)


class ReplicasOneAfterAnother(Replicas):
    """The same, each device's loss taken right after its forward."""

    def forward(self, batch):
        return batch

    def loss(self, outputs, batch):
        count = max(len(self.job.devices), 2)
        chunks = {name: column.chunk(count) for name, column in batch.items()}
        parts = [{name: chunk[device] for name, chunk in chunks.items()} for device in range(count)]
        return sum(self.job.loss(self.model(part), part) for part in parts) / count


class SplitsTheBatch(ReplicasOneAfterAnother):
    """One device that takes its batch in two halves although nobody asked for accumulation."""


class OneReplicaWithoutGradient(Replicas):
    def forward_devices(self, batch):
        first, *others = super().forward_devices(batch)
        return [first, *(output.detach() for output in others)]


class OddBuckets(Trainer):
    """Right: other buckets, gradients that are views into them, a graph that is told to be static."""

    def wrap(self, model):
        return DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True, static_graph=True)


subjects = [
    declare("by-hand", ByHand),
    declare("odd-buckets", OddBuckets),
    declare("replicas", Replicas, ["none", "dp", "ddp2"]),
    declare("sum", Sum),
    declare("loss-times-world", LossTimesWorld),
    declare("divided-twice", DividedTwice),
    declare("first-rank-only", FirstRankOnly),
    declare("clipped-before-the-average", ClippedBeforeTheAverage),
    declare("compressed-to-bfloat16", CompressedToBfloat16),
    declare("stale-gradient", StaleGradient),
    declare("never-zeroed", NeverZeroed),
    declare("one-parameter-forgotten", OneParameterForgotten),
    declare("without-synchronization", WithoutSynchronization),
    declare("in-no-sync", InNoSync),
    declare("replicas-take-their-own-loss", ReplicasTakeTheirOwnLoss, ["dp", "ddp2"]),
    declare("replicas-one-after-another", ReplicasOneAfterAnother, ["dp", "ddp2"]),
    declare("splits-the-batch", SplitsTheBatch, ["none", "ddp"]),
    declare("one-replica-without-gradient", OneReplicaWithoutGradient, ["dp", "ddp2"]),
]
