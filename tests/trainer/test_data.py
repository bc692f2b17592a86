"""Which samples a rank sees; everything else about the loader stays the user's."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from plumbline.trainer import MisconfigurationError
from plumbline.trainer.data_sharding import ShardedSampler, set_epoch, share_loader
from plumbline.trainer.nested import batch_length

samples_and_world = st.integers(1, 6).flatmap(lambda world: st.tuples(st.integers(world, 60), st.just(world)))


def shares(loader, world, training=True, epoch=0, seed=0):
    """The batches of each rank."""
    ranks = [share_loader(loader, world=world, rank=r, seed=seed, training=training) for r in range(world)]
    for rank in ranks:
        set_epoch(rank, epoch)
    return [[batch.tolist() for batch in rank] for rank in ranks]


def flat(batches):
    return [index for batch in batches for index in batch]


@given(samples_and_world, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_training_uses_each_sample_once_and_repeats_at_most_world_minus_one(sizes, batch_size, shuffle, epoch):
    samples, world = sizes
    ranks = shares(DataLoader(range(samples), batch_size, shuffle=shuffle), world, epoch=epoch)
    used = [index for rank in ranks for index in flat(rank)]
    assert set(used) == set(range(samples))
    assert len(used) - samples == -samples % world
    assert len({len(rank) for rank in ranks}) == 1


@given(samples_and_world, st.integers(1, 7), st.booleans())
def test_validation_uses_each_sample_exactly_once(sizes, batch_size, shuffle):
    samples, world = sizes
    ranks = shares(DataLoader(range(samples), batch_size, shuffle=shuffle), world, training=False)
    assert sorted(index for rank in ranks for index in flat(rank)) == list(range(samples))


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 3), st.integers(0, 9), st.booleans())
def test_a_step_consumes_the_same_samples_whatever_the_world(batches, world, epoch, seed, drop_last):
    batch = 12
    samples = batches * batch + (5 if drop_last else 0)
    one, many = (
        shares(
            DataLoader(range(samples), batch // ranks, shuffle=True, drop_last=drop_last),
            ranks,
            epoch=epoch,
            seed=seed,
        )
        for ranks in (1, world)
    )
    assert [sorted(step) for step in one[0]] == [sorted(flat(step)) for step in zip(*many, strict=True)]
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    assert flat(one[0]) == order[: batches * batch]


@given(st.integers(1, 50), st.integers(1, 5), st.sampled_from(["pad", "drop", "keep"]))
def test_a_shard_knows_its_length(count, world, rest):
    parts = [ShardedSampler(range(count), world, rank, rest, agree=False) for rank in range(world)]
    assert [len(part) for part in parts] == [len(list(part)) for part in parts]
    dealt = [list(part) for part in parts]
    assert dealt[0][:2] == list(range(count))[::world][:2] or rest == "drop"
    extra = sum(map(len, dealt)) - count
    assert extra == {"pad": -count % world, "drop": -(count % world), "keep": 0}[rest]


def test_epochs_differ_and_come_back():
    loader = DataLoader(range(20), 5, shuffle=True)
    first, second, again = (shares(loader, 2, epoch=epoch) for epoch in (0, 1, 0))
    assert first == again != second


def test_the_loaders_other_settings_stay():
    class Loader(DataLoader):
        pass

    def collate(items):
        return torch.tensor(items)

    def worker(_):
        pass

    settings = {
        "batch_size": 3,
        "num_workers": 2,
        "drop_last": True,
        "timeout": 7.0,
        "worker_init_fn": worker,
        "generator": torch.Generator(),
        "collate_fn": collate,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "pin_memory": False,
    }
    loader = Loader(range(20), shuffle=True, **settings)
    shared = share_loader(loader, world=2, rank=1, seed=3, training=True)
    assert type(shared) is Loader
    assert {name: getattr(shared, name) for name in settings} == settings
    assert (shared.sampler.seed, shared.sampler.rank, shared.sampler.drop_last) == (3, 1, True)
    assert shared.batch_sampler.batch_size == 3
    assert shared.batch_sampler.drop_last
    assert isinstance(loader.sampler, RandomSampler), "the user's own loader is left as it was"
    assert len(shared) == 3


def test_one_device_without_shuffling_keeps_its_loader():
    loader = DataLoader(range(5))
    assert share_loader(loader, world=1, rank=0, seed=0, training=True) is loader
    batches = [1, 2]
    assert share_loader(batches, world=1, rank=0, seed=0, training=True) is batches


def test_the_users_distributed_sampler_stays_and_learns_the_epoch():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1)
    loader = DataLoader(range(8), 2, sampler=sampler)
    assert share_loader(loader, world=2, rank=1, seed=5, training=True) is loader
    set_epoch(loader, 4)
    assert sampler.epoch == 4
    inside = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False))
    assert share_loader(inside, world=2, rank=1, seed=5, training=True) is inside
    set_epoch(inside, 5)
    assert sampler.epoch == 5
    with pytest.raises(MisconfigurationError, match="rank 1 of 2 on rank 0 of 2"):
        share_loader(loader, world=2, rank=0, seed=5, training=True)


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([3, 1, 4, 1, 5]),
        WeightedRandomSampler([1.0, 2.0, 3.0], 7),
        RandomSampler(range(9), replacement=True),
        RandomSampler(range(9), num_samples=4),
        [5, 3, 1],
    ],
)
def test_a_users_order_is_dealt_out_from_rank_0(sampler):
    loader = DataLoader(range(9), 2, sampler=sampler)
    shared = share_loader(loader, world=2, rank=1, seed=0, training=True)
    assert isinstance(shared.sampler, ShardedSampler)
    assert shared.sampler.agree
    assert shared.sampler.source is sampler
    assert share_loader(loader, world=1, rank=0, seed=0, training=True) is loader


def test_a_users_batches_are_dealt_out_whole():
    batches = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    loader = DataLoader(range(9), batch_sampler=batches)
    shared = share_loader(loader, world=2, rank=1, seed=0, training=True)
    assert isinstance(shared.batch_sampler, ShardedSampler)
    assert shared.batch_sampler.agree
    assert len(shared) == 3
    dealt = [list(ShardedSampler(batches, 2, rank, "pad", agree=False)) for rank in (0, 1)]
    assert dealt == [[[0, 1], [3, 4, 5], [7, 8]], [[2], [6], [0, 1]]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Shards(Stream):
    def shard(self, num_shards, index):
        return list(range(index, 10, num_shards))


def test_an_iterable_dataset_must_shard_itself():
    with pytest.raises(MisconfigurationError, match=r"shard\(num_shards, index\)"):
        share_loader(DataLoader(Stream()), world=2, rank=0, seed=0, training=True)
    alone = DataLoader(Stream())
    assert share_loader(alone, world=1, rank=0, seed=0, training=True) is alone
    shared = share_loader(DataLoader(Shards(), 2), world=2, rank=1, seed=0, training=True)
    assert shared.dataset == [1, 3, 5, 7, 9]
    itself = Stream()
    itself.shards_itself = True
    loader = DataLoader(itself)
    assert share_loader(loader, world=2, rank=1, seed=0, training=True) is loader


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(MisconfigurationError, match=r"returned a list.*DataLoader"):
        share_loader([1, 2], world=2, rank=0, seed=0, training=True)
    with pytest.raises(MisconfigurationError, match="3 samples for 4 processes"):
        share_loader(DataLoader(range(3)), world=4, rank=0, seed=0, training=True)
    assert len(share_loader(DataLoader(range(3)), world=4, rank=3, seed=0, training=False)) == 0


def test_the_length_of_a_batch():
    five = torch.zeros(5, 2)
    for batch in (five, [five], (torch.tensor(1.0), five), {"a": "text", "b": {"c": five}}):
        assert batch_length(batch) == 5
    assert batch_length("text") == 0
