"""Follows how a forward uses its parameters: in which order, and which of them ranks apply to rows of one matrix.

The latter is how ranks apply norms under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plumbline.check.rank.joint.operator_watch import OperatorWatch
from plumbline.check.rank.joint.weights import JointWeights
from plumbline.replay.collectives import is_collective, reaches_others
from plumbline.replay.memory import address_of
from plumbline.replay.nested import tensors_in

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass(frozen=True)
class _Past:
    """How a value was computed since ranks last communicated.

    ``used``: the parameters used, all of them equal on all ranks. ``is_part``: other parameters were used too.
    ``gathered``: parameters used before the value was gathered, each with the shape that the matrix of all ranks' rows
    would have.
    """

    used: frozenset[int] = frozenset()
    is_part: bool = False
    gathered: frozenset[tuple[int, int, int]] = frozenset()


@dataclass
class Uses:
    """How a forward uses parameters, by their ids: see ``followed_uses``."""

    on_rows: set[int] = field(default_factory=set)
    first: dict[int, str] = field(default_factory=dict)


@contextmanager
def followed_uses(weights: JointWeights, parts: Collection[int]) -> Iterator[Uses]:
    """Collect how a forward at these weights uses its parameters.

    ``first``: the operators that use them first, in this order. ``on_rows``: those that ranks apply to their rows of
    one matrix. Between two collectives, the forward then uses no parameter in ``parts``, which differ between ranks.
    The second collective gathers the rows, and the next product of matrices contracts the dimension that each rank had
    whole. A parameter of these rows is no part of a longer one, whose entries would belong to that dimension.
    """
    pasts: dict[int, tuple[StorageWeakRef, _Past]] = {}
    found = Uses()

    def after(func: Any, arguments: list[Any], outputs: Any) -> None:
        tensors, changed = list(tensors_in(arguments)), list(tensors_in(outputs))
        of_tensors = [(one, weights.owner_of(one)) for one in tensors]
        owners = {owner for _, owner in of_tensors if owner is not None}
        known = [pasts[at][1] for one, owner in of_tensors if owner is None and (at := _storage_of(one)) in pasts]
        name = func._schema.name.partition("::")[2]
        for _, owner in of_tensors:
            if owner is not None:
                found.first.setdefault(owner, name)
        past = _Past(
            frozenset().union(owners.difference(parts), *(one.used for one in known)),
            any(one.is_part for one in known) or not owners.isdisjoint(parts),
            frozenset().union(*(one.gathered for one in known)),
        )
        if name in _PRODUCTS:
            found.on_rows.update(one for one, *shape in past.gathered if _contracts(tensors[-2], tensors[-1], *shape))
            past = replace(past, gathered=frozenset())
        if is_collective(func) and reaches_others(func, arguments):
            past = _exchanged(name, tensors, changed, past)
        for one in changed:
            if address_of(one) and weights.owner_of(one) is None:
                # As long as there is a weak reference, no other storage gets the same number.
                pasts[_storage_of(one)] = StorageWeakRef(one.untyped_storage()), past  # type: ignore[no-untyped-call]

    with OperatorWatch(after=after):
        yield found


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if address_of(tensor) else 0


def _exchanged(name: str, tensors: Sequence[Tensor], received: Sequence[Tensor], past: _Past) -> _Past:
    sent = [one for one in tensors if all(one is not other for other in received)]
    if "gather" not in name or past.is_part or len(sent) != 1 or not sent[0].numel():
        return _Past()
    width = sent[0].shape[-1] if sent[0].dim() else 1
    rows = sum(one.numel() for one in received) // width
    return _Past(gathered=frozenset((one, rows, width) for one in past.used))


def _contracts(left: Tensor, right: Tensor, rows: int, width: int) -> bool:
    """Return whether the product of two matrices contracts the columns of a matrix of this shape."""
    return any(
        one.numel() == rows * width and one.shape[dimension] == width for one, dimension in ((left, -1), (right, -2))
    )
