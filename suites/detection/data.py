"""Wrong samples: shared between ranks, lost, or never reshuffled."""

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
    """Train correctly on ``batches(epoch)``."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in batches(epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def sampled(job, sampler, epoch):
    """Set the sampler's epoch, and return its batches."""
    sampler.set_epoch(epoch)
    return DataLoader(job.dataset, job.batch_size, sampler=sampler)


@known_bad("data", causes=["no-sampler"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def no_sampler(job):
    """Every rank sees the whole dataset, in its own order."""
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, sampler=RandomSampler(job.dataset)))


@known_bad("data", causes=["no-sampler"], on=CELLS)
def no_sampler_one_seed(job):
    """Every rank sees the whole dataset, in the same order."""
    generator = torch.Generator().manual_seed(job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, shuffle=True, generator=generator))


@known_bad("data", causes=["no-sampler"], on=CELLS)
def no_sampler_global_batch(job):
    """Every rank draws the whole global batch."""
    generator = torch.Generator().manual_seed(job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.global_batch_size, shuffle=True, generator=generator))


@known_bad("data", causes=["shards-overlap"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def sampler_seed_plus_rank(job):
    """Adds the rank to the sampler's seed, so each rank shards another permutation."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed + job.rank)
    fit(job, lambda epoch: sampled(job, sampler, epoch))


@known_bad("data", causes=["set-epoch-never-called"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def set_epoch_never_called(job):
    """Never calls ``set_epoch``, so every epoch has the same order."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    fit(job, lambda epoch: DataLoader(job.dataset, job.batch_size, sampler=sampler))


@known_bad("data", causes=["never-shuffled"], on={**any_check(*CELLS), **failing("samples", "mlp/ddp/1x2")})
def never_shuffled(job):
    """Does not shuffle, although the workload asks for it."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=False)
    fit(job, lambda epoch: sampled(job, sampler, epoch))


@known_bad("data", causes=["set-epoch-never-called"], on=CELLS)
def batches_cached(job):
    """Caches the first epoch's batches, and reuses them in every other epoch."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    kept = list(sampled(job, sampler, 0))
    fit(job, lambda epoch: kept)


@known_bad("data", causes=["samples-never-seen"], on={**any_check(*CELLS), **failing("steps", "mlp/ddp/1x2")})
def tail_dropped(job):
    """Leaves the last ``global_batch_size`` samples of the dataset out of every epoch."""
    whole = Subset(job.dataset, range(len(job.dataset) - job.global_batch_size))
    sampler = DistributedSampler(whole, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(whole, job.batch_size, sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def last_batch_dropped(job):
    """Drops the last batch of every epoch, by an off-by-one error."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    fit(job, lambda epoch: list(sampled(job, sampler, epoch))[:-1])


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def first_batch_lost(job):
    """Takes the first batch out of the iterator before training, for example to inspect it."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        iterator = iter(sampled(job, sampler, epoch))
        next(iterator)
        return iterator

    fit(job, batches)


@known_bad("data", causes=["batch-again"], on=CELLS)
def last_batch_again(job):
    """Trains on the last batch of every epoch twice."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        own = list(sampled(job, sampler, epoch))
        return [*own, own[-1]]

    fit(job, batches)


@known_bad("data", causes=["batches-of-another-size"], on=CELLS)
def sharded_twice(job):
    """Shards each shard again: each rank sees 1 / ``world_size`` of its samples, in smaller batches."""
    shard = Subset(job.dataset, range(job.rank, len(job.dataset), job.world_size))
    sampler = DistributedSampler(shard, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(shard, max(job.batch_size // job.world_size, 1), sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["drawn-twice-by-a-rank"], on=CELLS)
def drawn_with_replacement(job):
    """Draws samples with replacement."""

    def batches(epoch):
        generator = torch.Generator().manual_seed(job.seed + epoch)
        order = torch.randint(len(job.dataset), (len(job.dataset),), generator=generator)
        return DataLoader(job.dataset, job.batch_size, sampler=order[job.rank :: job.world_size].tolist())

    fit(job, batches)


@known_bad("data", causes=["samples-never-seen"], on=CELLS)
def shards_overlap_by_one(job):
    """Makes contiguous shards with inclusive ends: neighbours share a sample, and the last samples are never seen."""

    def batches(epoch):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epoch)).tolist()
        size = len(order) // job.world_size
        first = max(job.rank * size - job.rank, 0)
        return DataLoader(job.dataset, job.batch_size, sampler=order[first : first + size])

    fit(job, batches)


@known_bad("data", causes=["batches-of-another-size"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64"])
def local_batch_is_the_global_one(job):
    """Each rank draws batches of the global size from its own shard, so there are fewer, larger steps."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        sampler.set_epoch(epoch)
        return DataLoader(job.dataset, job.global_batch_size, sampler=sampler)

    fit(job, batches)


@known_bad("data", causes=["batch-again"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/32"])
def rank_zero_sees_the_same_batch(job):
    """Rank 0 repeats its first batch."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)

    def batches(epoch):
        own = list(sampled(job, sampler, epoch))
        return [own[0]] * len(own) if job.rank == 0 else own

    fit(job, batches)


@known_bad("data", causes=["trained-on-held-out-data"], on=["mlp/none/1x1/32", "mlp/none/1x1/64"])
def trained_on_the_validation_set(job):
    """Trains on the held-out samples, repeated as often as needed."""
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
    """Fills up the last batch of an epoch with samples from the beginning of the epoch."""

    def batches(epoch):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[: -len(order) % job.global_batch_size]])
        for batch in order.view(-1, job.world_size, job.batch_size):
            yield job.dataset.batch(batch[job.rank].tolist())

    fit(job, batches)


@known_bad("data", causes=["ranks-alike"], on=CELLS, data="iterations")
def ranks_draw_the_same_windows(job):
    """Seeds every rank's generator alike."""
    generator = torch.Generator().manual_seed(job.seed)
    by_iterations(job, lambda: drawn(job, generator))


@known_bad("data", causes=["ranks-alike"], on=CELLS, data="iterations")
def generators_meet_in_one_step(job):
    """Seeds every rank's generator alike in the second step."""
    generator, count = seeded(job), iter(range(job.steps))

    def draw():
        if next(count) == 1:
            generator.manual_seed(1)
        return drawn(job, generator)

    by_iterations(job, draw)


@known_bad("data", causes=["ranks-alike"], on=["mlp/ddp/1x3/32"], data="iterations")
def two_of_three_ranks_draw_alike(job):
    """Seeds with ``rank // 2``, so ranks 0 and 1 draw the same samples."""
    generator = torch.Generator().manual_seed(job.seed + job.rank // 2)
    by_iterations(job, lambda: drawn(job, generator))


@known_bad("data", causes=["batch-again"], on=CELLS, data="iterations")
def window_drawn_once(job):
    """Draws one batch before the loop, and reuses it in every step."""
    batch = drawn(job, seeded(job))
    by_iterations(job, lambda: batch)


@known_bad("data", causes=["batches-of-another-size"], on=CELLS, data="iterations")
def windows_of_the_global_size(job):
    """Every rank draws as many samples as all ranks together should."""
    generator = seeded(job)

    def draw():
        ids = torch.randint(len(job.dataset), (job.global_batch_size,), generator=generator)
        return job.dataset.batch(ids.tolist())

    by_iterations(job, draw)


@known_bad("data", "optimizer", causes=["another-number-of-steps"], on=CELLS, data="iterations")
def one_iteration_too_few(job):
    """Takes one step too few, as ``range(1, job.steps)`` would."""
    by_iterations(job, steps=job.steps - 1)


@known_bad("data", causes=["set-epoch-never-called"], on=ORDERED, shuffle="always")
def always_shuffled_the_same_way(job):
    """Always shuffles, as declared, but every epoch like the first."""
    in_epochs(job, shuffle=True, epoch_of=lambda epoch: 0)


@known_bad("data", causes=["never-shuffled"], on=ORDERED, shuffle="always")
def never_although_always(job):
    """Declares that it always shuffles, but never does."""
    in_epochs(job, shuffle=False)


@known_bad("data", causes=["order-of-its-own"], on=ORDERED, shuffle="never")
def shuffled_although_never(job):
    """Declares that it never shuffles, but does."""
    in_epochs(job, shuffle=True)


@known_bad("data", causes=["order-of-its-own"], on=["mlp/ddp/1x2/32", "sequential/ddp/1x3/32"], shuffle="never")
def in_order_and_cut_into_shards(job):
    """Never shuffles, as declared, but gives each rank a contiguous shard."""
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
    """Each rank shuffles within a fixed shard, so the order depends on the number of devices."""

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
    """Computes the loss of only half of the outputs."""

    def loss(self, outputs, batch):
        half = len(outputs) // 2
        return self.job.loss(outputs[:half], {name: column[:half] for name, column in batch.items()})


@known_bad(on=failing("gradients", "mlp/ddp/1x2"))
class LabelsOfOtherSamples(BaseTrainer):
    """Compares each output with the label of another sample."""

    def loss(self, outputs, batch):
        return self.job.loss(outputs.roll(1, 0), batch)


@known_bad("data", causes=["order-of-its-own"], on={"sequential/none/1x1/32": "samples"})
class ShuffledAlthoughSequential(BaseTrainer):
    """Shuffles, although the workload asks for the order of the dataset."""

    def make_loader(self):
        self.job.shuffle = True
        return super().make_loader()


@known_bad("data", causes=["order-of-its-own"], on={"sequential/ddp/1x3/32": "samples"})
class ContiguousShards(BaseTrainer):
    """Gives each rank a contiguous shard instead of every ``world_size``-th sample."""

    def make_loader(self):
        size = len(self.job.dataset) // self.job.world_size
        share = Subset(self.job.dataset, range(self.job.rank * size, (self.job.rank + 1) * size))
        sampler = SequentialSampler(share)
        sampler.set_epoch = lambda epoch: None
        return DataLoader(share, batch_size=self.job.batch_size, sampler=sampler)


@known_bad("data", causes=["samples-never-seen"], on={"uneven/none/1x1/32": "steps", "metrics/none/1x1/32": "samples"})
class ShortLastBatchDropped(BaseTrainer):
    """Sets ``drop_last``, although the workload does not ask for it."""

    def make_loader(self):
        sampler = super().make_loader().sampler
        return DataLoader(self.job.dataset, self.job.batch_size, sampler=sampler, drop_last=True)


@known_bad(on={"dropout/ddp/1x3/32": "gradients"})
class IndexOfAnotherOrder(BaseTrainer):
    """Sorts the batch's ``index``, but not its other columns."""

    def forward(self, batch):
        return super().forward({**batch, "index": batch["index"].sort().values})
