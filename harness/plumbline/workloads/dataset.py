"""The data of training problems: samples as dicts of tensors, and map-style datasets of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import Dataset


class Sample(dict[str, Tensor]):
    """A dict of tensors with ``to``. ``default_collate`` makes batches of the same type."""

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        """Move every tensor in place, with the arguments of ``Tensor.to``, and return the dict itself.

        Like transformers' ``BatchEncoding.to``, because scripts call it without using the result.
        """
        for name, column in self.items():
            self[name] = column.to(*args, **kwargs)
        return self

    def __copy__(self) -> Sample:
        """Return a shallow copy, faster than the default way through ``__reduce_ex__``."""
        return Sample(self)


def _columns(sample: Sample) -> tuple[list[Tensor], list[str]]:
    return list(sample.values()), list(sample)


def _sample(columns: Iterable[Tensor], names: Iterable[str]) -> Sample:
    return Sample(zip(names, columns, strict=True))


def _columns_with_keys(sample: Sample) -> tuple[list[tuple[_pytree.KeyEntry, Tensor]], list[str]]:
    return [(_pytree.MappingKey(name), column) for name, column in sample.items()], list(sample)


# torch traverses nested inputs by exact type (FSDP's casts, torch.compile, torch.export), so a subclass of dict must be
# registered.
_pytree.register_pytree_node(
    Sample,
    _columns,
    _sample,
    flatten_with_keys_fn=_columns_with_keys,
    serialized_type_name="plumbline.workloads.dataset.Sample",
)


Batch = dict[str, Tensor]


class Columns(Dataset[Batch]):
    """A map-style dataset over columns of equal length. Every sample has its position as ``"index"``."""

    def __init__(self, columns: Batch) -> None:
        count = len(next(iter(columns.values())))
        self.columns: Batch = {**columns, "index": torch.arange(count)}

    def __len__(self) -> int:
        return len(self.columns["index"])

    def __getitem__(self, position: int) -> Batch:
        return Sample({name: column[position] for name, column in self.columns.items()})

    def to(self, dtype: torch.dtype) -> Columns:
        """Return the same samples with their floating-point columns cast."""
        return Columns({name: one.to(dtype) if one.is_floating_point() else one for name, one in self.columns.items()})

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return Sample({name: column[chosen] for name, column in self.columns.items()})
