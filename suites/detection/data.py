"""Wrong samples: shared, lost, or never shuffled again."""

from __future__ import annotations

import torch
from base_trainer import BaseTrainer
from expect import any_check, failing, known_bad
from loop import ddp
from otherwise import by_iterations, drawn, in_epochs, seeded
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler, Subset

CELLS = ["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"]
ORDERED = [*CELLS, "sequential/ddp/1x2/32"]


def fit(job, batches):
    """Train rightly on ``batches(epoch)``."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in batches(epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def sampled(job, sampler, epoch):
    """Return the batches of a sampler that is told the epoch."""
    sampler.set_epoch(epoch)
    return DataLoader(job.dataset, job.batch_size, sampler=sampler)


@known_bad("data", causes=["no-sampler"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def no_sampler(job):
    """Every rank sees everything, in an order of its own."""
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, sampler=RandomSampler(job.dataset)))


@known_bad("data", causes=["no-sampler"], on=CELLS)
def no_sampler_one_seed(job):
    """Every rank sees everything, in one and the same order."""
    generator = torch.Generator().manual_seed(job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, shuffle=True, generator=generator))


@known_bad("data", causes=["no-sampler"], on=CELLS)
def no_sampler_global_batch(job):
    """Every rank draws the whole batch of all ranks."""
    generator = torch.Generator().manual_seed(job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.global_batch_size, shuffle=True, generator=generator))


@known_bad("data", causes=["shards-overlap"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def sampler_seed_plus_rank(job):
    """The sampler's seed depends on the rank: each shards another permutation."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed + job.rank)
    fit(job, lambda epoch: sampled(job, sampler, epoch))


@known_bad("data", causes=["set-epoch-never-called"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def set_epoch_never_called(job):
    """Each epoch has the first one's order."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, sampler=sampler))


@known_bad("data", causes=["never-shuffled"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def never_shuffled(job):
    """The workload shuffles, the sampler does not."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=False)
    fit(job, lambda epoch: sampled(job, sampler, epoch))


@known_bad("data", causes=["set-epoch-never-called"], on=CELLS)
def batches_cached(job):
    """The batches of the first epoch are kept and used again in every other one."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    kept = list(sampled(job, sampler, 0))
    fit(job, lambda epoch: kept)


@known_bad("data", causes=["samples-never-seen"], on={**any_check(*CELLS), **failing("steps", "mlp/ddp/1x2")})
def tail_dropped(job):
    """Shards of so many whole batches that the end of each epoch is never seen."""
    whole = Subset(job.dataset, range(len(job.dataset) - job.global_batch_size))
    sampler = DistributedSampler(whole, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(whole, job.batch_size, sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def last_batch_dropped(job):
    """A loader that is told to drop the last batch, by a count that is one too small."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    fit(job, lambda epoch: list(sampled(job, sampler, epoch))[:-1])


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def first_batch_lost(job):
    """A look at the data before training takes the first batch out of the iterator."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        iterator = iter(sampled(job, sampler, epoch))
        next(iterator)
        return iterator

    fit(job, batches)


@known_bad("data", causes=["batch-again"], on=CELLS)
def last_batch_again(job):
    """The last batch of an epoch is trained on once more."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        own = list(sampled(job, sampler, epoch))
        return [*own, own[-1]]

    fit(job, batches)


@known_bad("data", causes=["batches-of-another-size"], on=CELLS)
def sharded_twice(job):
    """A shard is sharded again: each rank has the world-th part of what it should have, in small batches."""
    shard = Subset(job.dataset, range(job.rank, len(job.dataset), job.world_size))
    sampler = DistributedSampler(shard, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(shard, max(job.batch_size // job.world_size, 1), sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["drawn-twice-by-a-rank"], on=CELLS)
def drawn_with_replacement(job):
    """Samples are drawn with replacement."""

    def batches(epoch):
        generator = torch.Generator().manual_seed(job.seed + epoch)
        order = torch.randint(len(job.dataset), (len(job.dataset),), generator=generator)
        return DataLoader(job.dataset, job.batch_size, sampler=order[job.rank :: job.world_size].tolist())

    fit(job, batches)


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def shards_overlap_by_one(job):
    """Contiguous shards whose ends were counted as inside: the neighbours share a sample, one is never seen."""

    def batches(epoch):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epoch)).tolist()
        size = len(order) // job.world_size
        first = max(job.rank * size - job.rank, 0)
        return DataLoader(job.dataset, job.batch_size, sampler=order[first : first + size])

    fit(job, batches)


@known_bad("data", causes=["batches-of-another-size"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64"])
def local_batch_is_the_global_one(job):
    """Each rank draws batches of the global size from its own shard: fewer and larger steps."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(job.dataset, job.global_batch_size, sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["batch-again"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/32"])
def rank_zero_sees_the_same_batch(job):
    """One rank's loader is stuck at its first batch."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        own = list(sampled(job, sampler, epoch))
        return [own[0]] * len(own) if job.rank == 0 else own

    fit(job, batches)


@known_bad("data", causes=["trained-on-held-out-data"], on=["mlp/none/1x1/32", "mlp/none/1x1/64"])
def trained_on_the_validation_set(job):
    """The loader was given the held-out samples, of which there are fewer: it goes round them until it has enough."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(job.batch_size):
            batch = job.val_dataset.batch((ids % len(job.val_dataset)).tolist())
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "data",
    causes=["last-batch-filled-up"],
    on={**any_check("uneven/ddp/1x2/32", "uneven/ddp/1x3/32"), "uneven/ddp/1x3/32": "samples"},
)
def last_batch_filled_up(job):
    """The last batch of an epoch is made as long as the others, with samples from the epoch's beginning."""

    def batches(epoch):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[: -len(order) % job.global_batch_size]])
        for batch in order.view(-1, job.world_size, job.batch_size):
            yield job.dataset.batch(batch[job.rank].tolist())

    fit(job, batches)


@known_bad("data", causes=["ranks-alike"], on=CELLS, data="iterations")
def ranks_draw_the_same_windows(job):
    """Every rank seeds its generator alike."""
    generator = torch.Generator().manual_seed(job.seed)
    by_iterations(job, lambda: drawn(job, generator))


@known_bad("data", causes=["ranks-alike"], on=CELLS, data="iterations")
def generators_meet_in_one_step(job):
    """In the second step the generators are all seeded with its number."""
    generator, count = seeded(job), iter(range(job.steps))

    def draw():
        if next(count) == 1:
            generator.manual_seed(1)
        return drawn(job, generator)

    by_iterations(job, draw)


@known_bad("data", causes=["ranks-alike"], on=["mlp/ddp/1x3/32"], data="iterations")
def two_of_three_ranks_draw_alike(job):
    """The seed is the rank's, divided by two."""
    generator = torch.Generator().manual_seed(job.seed + job.rank // 2)
    by_iterations(job, lambda: drawn(job, generator))


@known_bad("data", causes=["batch-again"], on=CELLS, data="iterations")
def window_drawn_once(job):
    """The batch is fetched before the loop, and never again."""
    batch = drawn(job, seeded(job))
    by_iterations(job, lambda: batch)


@known_bad("data", causes=["batches-of-another-size"], on=CELLS, data="iterations")
def windows_of_the_global_size(job):
    """Every rank draws as many samples as all of them should together."""
    generator = seeded(job)

    def draw():
        ids = torch.randint(len(job.dataset), (job.global_batch_size,), generator=generator)
        return job.dataset.batch(ids.tolist())

    by_iterations(job, draw)


@known_bad("data", "optimizer", causes=["another-number-of-steps"], on=CELLS, data="iterations")
def one_iteration_too_few(job):
    """``range(1, job.steps)``."""
    by_iterations(job, steps=job.steps - 1)


@known_bad("data", causes=["set-epoch-never-called"], on=ORDERED, shuffle="always")
def always_shuffled_the_same_way(job):
    """It shuffles always, as it declares, and every epoch like the first."""
    in_epochs(job, shuffle=True, epoch_of=lambda epoch: 0)


@known_bad("data", causes=["never-shuffled"], on=ORDERED, shuffle="always")
def never_although_always(job):
    """It declares that it shuffles always, and does not."""
    in_epochs(job, shuffle=False)


@known_bad("data", causes=["order-of-its-own"], on=ORDERED, shuffle="never")
def shuffled_although_never(job):
    """It declares that it never shuffles, and does."""
    in_epochs(job, shuffle=True)


@known_bad("data", causes=["order-of-its-own"], on=["mlp/ddp/1x2/32", "sequential/ddp/1x3/32"], shuffle="never")
def in_order_and_cut_into_shards(job):
    """It never shuffles, as it declares, but each rank goes through a contiguous part."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    shard = torch.arange(len(job.dataset)).chunk(job.world_size)[job.rank]
    for _ in range(job.epochs):
        for ids in shard.split(job.batch_size):
            batch = job.dataset.batch(ids.tolist())
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("data", causes=["samples-never-seen"], on=failing("samples", "mlp/ddp/1x2"))
class OneSampleTwice(BaseTrainer):
    """Rank 0 draws its first sample again in place of its last: one sample is never seen."""

    def make_loader(self):
        class Repeating(DistributedSampler):
            def __iter__(self):
                own = list(super().__iter__())
                return iter([*own[:-1], own[0]] if self.rank == 0 else own)

        sampler = Repeating(self.job.dataset, self.job.world_size, self.job.rank, seed=self.job.seed)
        return DataLoader(self.job.dataset, self.job.batch_size, sampler=sampler)


@known_bad("data", causes=["shards-kept"], on={"mlp/ddp/1x2/32": "samples"})
class ShardsKept(BaseTrainer):
    """A rank shuffles inside its own shard: what it sees depends on the number of devices."""

    def make_loader(self):
        job = self.job

        class Shard(Sampler):
            def set_epoch(self, epoch):
                self.epoch = epoch

            def __len__(self):
                return len(job.dataset) // job.world_size

            def __iter__(self):
                order = torch.randperm(len(self), generator=torch.Generator().manual_seed(job.seed + self.epoch))
                return iter((order * job.world_size + job.rank).tolist())

        return DataLoader(job.dataset, job.batch_size, sampler=Shard())


@known_bad(on=failing("samples", "mlp/ddp/1x2"))
class LossOfHalfTheBatch(BaseTrainer):
    """The other half goes through the model and not through the loss."""

    def loss(self, outputs, batch):
        half = len(outputs) // 2
        return self.job.loss(outputs[:half], {name: column[:half] for name, column in batch.items()})


@known_bad(on=failing("gradients", "mlp/ddp/1x2"))
class LabelsOfOtherSamples(BaseTrainer):
    """The samples are the right ones, their labels are each other's."""

    def loss(self, outputs, batch):
        return self.job.loss(outputs.roll(1, 0), batch)


@known_bad("data", causes=["order-of-its-own"], on={"sequential/none/1x1/32": "samples"})
class ShuffledAlthoughSequential(BaseTrainer):
    """The workload asks for the order of the dataset, and the sampler shuffles."""

    def make_loader(self):
        self.job.shuffle = True
        return super().make_loader()


@known_bad("data", causes=["order-of-its-own"], on={"sequential/ddp/1x3/32": "samples"})
class ContiguousShards(BaseTrainer):
    """Each rank goes through a part of its own, in order, and not through every world-th sample."""

    def make_loader(self):
        size = len(self.job.dataset) // self.job.world_size
        share = Subset(self.job.dataset, range(self.job.rank * size, (self.job.rank + 1) * size))
        sampler = SequentialSampler(share)
        sampler.set_epoch = lambda epoch: None
        return DataLoader(share, batch_size=self.job.batch_size, sampler=sampler)


@known_bad("data", causes=["samples-never-seen"], on={"uneven/none/1x1/32": "steps", "metrics/none/1x1/32": "samples"})
class ShortLastBatchDropped(BaseTrainer):
    """``drop_last``, which nobody asked for."""

    def make_loader(self):
        sampler = super().make_loader().sampler
        return DataLoader(self.job.dataset, self.job.batch_size, sampler=sampler, drop_last=True)


@known_bad(on={"dropout/ddp/1x3/32": "gradients"})
class IndexOfAnotherOrder(BaseTrainer):
    """A batch whose ``index`` was sorted, and the other columns not."""

    def forward(self, batch):
        return super().forward({**batch, "index": batch["index"].sort().values})
