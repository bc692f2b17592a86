"""Draws batches on one rank for all stages, so that data order and augmentation are the same as on one device."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from plumbline.trainer.balanced.exchange import StageTimeout
from plumbline.trainer.data_sharding import known_length, set_epoch
from plumbline.trainer.errors import MisconfigurationError


class SameBatches:
    """Yields the batches of rank 0's loader on all ranks. Other ranks do not iterate over their ``loader``."""

    def __init__(self, loader: Any, rank: int, control: Any, timeout: StageTimeout) -> None:
        self.loader, self.rank, self.control, self.timeout = loader, rank, control, timeout
        self.sampler = self  # because set_epoch() is called on a loader's sampler

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader) if self.rank == 0 else iter(())
        while True:
            box = [tuple(itertools.islice(batches, 1))]
            with self.timeout.waiting("the next batch"):
                dist.broadcast_object_list(box, 0, self.control)
            if not box[0]:  # no batch is left
                return
            yield box[0][0]

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.loader, epoch)


def first_batch(loader: Any, epoch: int) -> Any:
    """Return a batch like those of training, without advancing the loader or random generators."""
    set_epoch(loader, epoch)
    state = random.getstate()
    with torch.random.fork_rng([]):
        try:
            return next(iter(_copied(loader)))
        finally:
            random.setstate(state)


def _copied(loader: Any) -> Any:
    """Return a loader that loads in this process, with copies of the samplers and the same dataset."""
    if not isinstance(loader, DataLoader):
        return loader
    clone, memo = copy.copy(loader), {id(loader.dataset): loader.dataset}
    changes: dict[str, Any] = {
        name: copy.deepcopy(loader.__dict__[name], memo)
        for name in ("sampler", "batch_sampler", "generator")
        if name in loader.__dict__
    }
    clone.__dict__.update(changes, num_workers=0, prefetch_factor=None, persistent_workers=False, _iterator=None)
    return clone


def sizes_of_batches(loader: Any) -> set[int]:
    """Return the batch sizes that are known in advance: the usual size and the last batch's."""
    batch_size, samples = getattr(loader, "batch_size", None), known_length(getattr(loader, "dataset", ()))
    if batch_size is None:
        return set()
    if samples is None or loader.drop_last:
        return {batch_size}
    samples = known_length(loader.sampler) or samples
    return {size for size in (min(batch_size, samples), samples % batch_size) if size}


def possible_micro_batches(loader: Any, wanted: int | None) -> list[int]:
    """Return the numbers of micro-batches that divide all batches of the loader, or only ``wanted`` if it is given."""
    sizes = sizes_of_batches(loader)
    if wanted is not None:
        for size in sizes:
            if size % wanted:
                raise MisconfigurationError(indivisible(size, wanted))
        return [wanted]
    common = math.gcd(*sizes) if sizes else 1
    if common == 1 < max(sizes, default=1):
        warnings.warn(
            f"Batches of {' and '.join(map(str, sorted(sizes)))} samples do not divide into equal micro-batches, "
            "so each device waits while another one computes: use drop_last=True, or another batch_size.",
            stacklevel=2,
        )
    return divisors(common)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def indivisible(samples: int, micro_batches: int) -> str:
    return (
        f"A batch of {samples} samples does not divide into {micro_batches} micro-batches: use a batch_size that is a "
        "multiple of micro_batches, and drop_last=True where the last batch is shorter."
    )
