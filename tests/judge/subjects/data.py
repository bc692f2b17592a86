"""Wrong samples: shared, lost, never shuffled again, or the right ones with the wrong loss."""

from __future__ import annotations

import torch
import torch.distributed
from right import Trainer, declare
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, Subset


class NoSampler(Trainer):
    """Every rank sees everything, in an order of its own."""

    def make_sampler(self, dataset):
        return RandomSampler(dataset)

    def begin_epoch(self, epoch):
        pass


class SeedPlusRank(Trainer):
    def make_sampler(self, dataset):
        job = self.job
        return DistributedSampler(dataset, job.world_size, job.rank, seed=job.seed + job.rank)


class SetEpochNeverCalled(Trainer):
    def begin_epoch(self, epoch):
        pass


class NeverShuffled(Trainer):
    def make_sampler(self, dataset):
        return DistributedSampler(dataset, self.job.world_size, self.job.rank, shuffle=False)


class TailDropped(Trainer):
    """The last batch of each epoch is never trained on."""

    def __init__(self, job):
        super().__init__(job)
        whole = len(job.dataset) - job.global_batch_size
        self.sampler = self.make_sampler(Subset(job.dataset, range(whole)))
        self.loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=self.sampler)


class LocalRankForRank(Trainer):
    """The nodes train on the same data."""

    def make_sampler(self, dataset):
        job = self.job
        return DistributedSampler(dataset, job.world_size, job.local_rank, seed=job.seed)


class OneSampleTwice(Trainer):
    """Rank 0 draws its first sample again in place of its last: one sample is never seen."""

    def make_sampler(self, dataset):
        class Repeating(DistributedSampler):
            def __iter__(self):
                own = list(super().__iter__())
                return iter([*own[:-1], own[0]] if self.rank == 0 else own)

        return Repeating(dataset, self.job.world_size, self.job.rank, seed=self.job.seed)


class ShardKeptForEver(Trainer):
    """A rank shuffles inside its own shard: what it sees depends on the number of devices."""

    def make_sampler(self, dataset):
        job = self.job

        class Shard(Sampler):
            def set_epoch(self, epoch):
                self.epoch = epoch

            def __len__(self):
                return len(dataset) // job.world_size

            def __iter__(self):
                generator = torch.Generator().manual_seed(job.seed + self.epoch)
                order = torch.randperm(len(self), generator=generator)
                return iter((order * job.world_size + job.rank).tolist())

        return Shard()


class LossOfHalfTheBatch(Trainer):
    def loss(self, outputs, batch):
        half = len(outputs) // 2
        return self.job.loss(outputs[:half], {name: column[:half] for name, column in batch.items()})


class LabelsOutOfStep(Trainer):
    """The samples are the right ones, their labels are each other's."""

    def loss(self, outputs, batch):
        return self.job.loss(outputs.roll(1, 0), batch)


class PaddedLength(Trainer):
    """The summed token loss over the padded length."""

    def loss(self, outputs, batch):
        return self.job.loss(outputs, batch) * batch["real"].sum() / batch["real"].numel()


def gathered(tensor, differentiable):
    """Return every rank's ``tensor``, this rank's own with its graph, the others' only if ``differentiable``."""
    if differentiable:
        return torch.cat(torch.distributed.nn.functional.all_gather(tensor))
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor)
    parts[torch.distributed.get_rank()] = tensor
    return torch.cat(parts)


class AllNegatives(Trainer):
    """The contrastive loss over every rank's outputs. Right: the whole batch's gradient, as one device has it."""

    differentiable = True

    def loss(self, outputs, batch):
        first, second = gathered(outputs, self.differentiable).unbind(1)
        similarity = first @ second.T / 0.5
        return torch.nn.functional.cross_entropy(similarity, torch.arange(len(similarity)))


class AllNegativesWithoutGradient(AllNegatives):
    differentiable = False


class AllNegativesThroughTheJob(Trainer):
    """Right as well: the job's own loss, given every rank's outputs and samples."""

    def loss(self, outputs, batch):
        everything = {name: gathered(column, False) for name, column in batch.items()}
        return self.job.loss(gathered(outputs, True), everything)


subjects = [
    declare("no-sampler", NoSampler),
    declare("seed-plus-rank", SeedPlusRank),
    declare("set-epoch-never-called", SetEpochNeverCalled),
    declare("never-shuffled", NeverShuffled),
    declare("tail-dropped", TailDropped),
    declare("local-rank-for-rank", LocalRankForRank),
    declare("one-sample-twice", OneSampleTwice),
    declare("shard-kept-for-ever", ShardKeptForEver),
    declare("loss-of-half-the-batch", LossOfHalfTheBatch),
    declare("labels-out-of-step", LabelsOutOfStep),
    declare("padded-length", PaddedLength),
    declare("all-negatives", AllNegatives),
    declare("all-negatives-through-the-job", AllNegativesThroughTheJob),
    declare("all-negatives-without-gradient", AllNegativesWithoutGradient),
]
