"""Gives each rank its share of the samples, and refuses data that cannot be divided."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch.distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from plumbline.trainer.errors import MisconfigurationError


class ShardedSampler(Sampler[Any]):
    """Yields every ``world``-th item of ``source``, a sampler of indices or batches, beginning with item ``rank``.

    ``rest`` says what to do if the number of items is not a multiple of ``world``: ``"pad"`` repeats the first items,
    ``"drop"`` omits the last ones, ``"keep"`` gives some ranks one item more. ``agree``: use rank 0's order on all
    ranks, for sources whose random generators can differ between ranks.
    """

    def __init__(self, source: Any, world: int, rank: int, rest: str, agree: bool) -> None:
        self.source, self.world, self.rank, self.rest, self.agree = source, world, rank, rest, agree

    def __iter__(self) -> Iterator[Any]:
        order = list(self.source) if self.rank == 0 or not self.agree else []
        if self.agree:
            box = [order]
            torch.distributed.broadcast_object_list(box, src=0)
            order = box[0]
        if self.rest != "keep":
            even = self._even(len(order))
            order = (order * (even // max(len(order), 1) + 1))[:even]
        return iter(order[self.rank :: self.world])

    def __len__(self) -> int:
        count = len(self.source)
        return len(range(self.rank, count if self.rest == "keep" else self._even(count), self.world))

    def _even(self, count: int) -> int:
        return (count + (self.world - 1 if self.rest == "pad" else 0)) // self.world * self.world

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)


def rank_loader(trainer: Any, loader: Any, *, training: bool) -> Any:
    if loader is None:
        return None
    check_loader(loader, trainer.plan, training)
    world = trainer.plan.data_ranks
    rank = trainer.rank if world > 1 else 0
    return share_loader(loader, world=world, rank=rank, seed=trainer.plan.seed, training=training)


def share_loader(loader: Any, *, world: int, rank: int, seed: int, training: bool) -> Any:
    """Return a loader like the user's that yields only this rank's share.

    A shuffling loader gets an order that depends only on (seed, epoch): with one device and batch size 24, or with four
    ranks and batch size 6, a step uses the same samples. In training, at most ``world - 1`` samples are repeated; in
    validation, none. If the user has a sampler or batch sampler, rank 0's order is divided among ranks. A user's
    DistributedSampler is kept.
    """
    name = "train_dataloader" if training else "val_dataloader"
    if not isinstance(loader, DataLoader):
        if world > 1:
            raise MisconfigurationError(
                f"{name} returned a {type(loader).__name__}, which cannot be shared by {world} processes: "
                "return a torch.utils.data.DataLoader."
            )
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader if world == 1 else _share_iterable(loader, name, world, rank)
    samples = known_length(loader.dataset)
    if training and samples is not None and samples < world > 1:
        raise MisconfigurationError(
            f"{name} has {samples} samples for {world} processes: use fewer gpus, or more data."
        )
    whole_batches = loader.batch_size is None and loader.batch_sampler is not None
    own = getattr(loader.batch_sampler, "sampler", None) if whole_batches else loader.sampler
    if isinstance(own, DistributedSampler):
        if (own.num_replicas, own.rank) != (world, rank):
            raise MisconfigurationError(
                f"{name} has a DistributedSampler for rank {own.rank} of {own.num_replicas} on rank {rank} "
                f"of {world}: omit its num_replicas and rank, or omit the sampler."
            )
        return loader
    rest = "keep" if not training else "drop" if loader.drop_last else "pad"
    if whole_batches:
        if world == 1:
            return loader
        return rebuilt(loader, batch_sampler=ShardedSampler(loader.batch_sampler, world, rank, rest, agree=True))
    shuffles = type(own) is RandomSampler and not own.replacement and own.num_samples == samples
    if world == 1 and not (shuffles and training):
        return loader
    if not shuffles and type(own) is not SequentialSampler:
        return rebuilt(loader, sampler=ShardedSampler(own, world, rank, rest, agree=True))
    if not training:
        assert samples is not None  # torch has counted them for its sampler
        return rebuilt(loader, sampler=ShardedSampler(range(samples), world, rank, rest, agree=False))
    sampler: Sampler[Any] = DistributedSampler(
        loader.dataset, world, rank, shuffle=shuffles, seed=seed, drop_last=loader.drop_last
    )
    return rebuilt(loader, sampler=sampler)


def _share_iterable(loader: DataLoader[Any], name: str, world: int, rank: int) -> DataLoader[Any]:
    if getattr(loader.dataset, "shards_itself", False):
        return loader
    dataset: Any = loader.dataset
    if hasattr(dataset, "shard"):
        return rebuilt(loader, dataset=dataset.shard(num_shards=world, index=rank))
    raise MisconfigurationError(
        f"The IterableDataset of {name} would give all {world} processes the same samples: give it a method "
        "shard(num_shards, index) that returns a share, or set shards_itself = True where it does so already."
    )


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of the loader with another dataset, sampler or batch_sampler, and all other settings unchanged.

    A copy, unlike a new DataLoader, keeps subclasses and the settings of newer torch versions. DataLoader refuses
    assignments to these attributes, hence ``__dict__``.
    """
    clone = copy.copy(loader)
    if "sampler" in changes and loader.batch_sampler is not None:
        assert loader.batch_size is not None
        changes["batch_sampler"] = BatchSampler(changes["sampler"], loader.batch_size, loader.drop_last)
    clone.__dict__.update(changes, _iterator=None)
    return clone


def check_loader(loader: Any, plan: Any, training: bool) -> None:
    name = "train_dataloader" if training else "val_dataloader"
    share = loader
    ready_made = isinstance(getattr(loader, "sampler", None), DistributedSampler)
    if not ready_made and not hasattr(getattr(loader, "dataset", None), "shard"):  # otherwise, ranks make the shares
        share = share_loader(loader, world=plan.data_ranks, rank=0, seed=plan.seed, training=training)
    if known_length(loader) == 0 or (training and known_length(share) == 0):
        raise MisconfigurationError(
            f"{name} has no batches: it needs more samples, a smaller batch_size, or drop_last=False."
        )
    batch_size = getattr(loader, "batch_size", None)
    if training and batch_size is not None and batch_size < plan.devices_per_process:
        raise MisconfigurationError(
            f"{name} has batches of {batch_size}, fewer than the {plan.devices_per_process} devices they are "
            f"split over: use a batch_size of {plan.devices_per_process} or more."
        )


def known_length(loader: Any) -> int | None:
    """Return the length of a loader, sampler or dataset, None if it is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch to the loader's samplers and dataset that have ``set_epoch``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in {id(part): part for part in (*parts, getattr(loader, "dataset", None))}.values():
        if part is not None and hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
