"""One sample, or one batch of them: a dict of tensors that can be moved to a device as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


class Sample(dict[str, Tensor]):
    """A dict of tensors with ``to``. ``default_collate`` makes a batch of the same type of it."""

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        """Move every tensor in place, with the arguments of ``Tensor.to``, and return the dict itself.

        In place as transformers' ``BatchEncoding.to`` does it, because scripts call it without using the result.
        """
        for name, column in self.items():
            self[name] = column.to(*args, **kwargs)
        return self

    def __copy__(self) -> Sample:
        """Return a shallow copy; without this, ``copy.copy`` takes the slow way of pickling."""
        return Sample(self)


def _columns(sample: Sample) -> tuple[list[Tensor], list[str]]:
    return list(sample.values()), list(sample)


def _sample(columns: Iterable[Tensor], names: Iterable[str]) -> Sample:
    return Sample(zip(names, columns, strict=True))


# torch walks through nested inputs by their exact types (FSDP's casts, torch.compile): a dict's subclass must be known.
_pytree.register_pytree_node(Sample, _columns, _sample, serialized_type_name="harness.workloads.sample.Sample")
