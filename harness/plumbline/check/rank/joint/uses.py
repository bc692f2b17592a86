"""Follows how a forward uses its parameters: in which order, and which of them ranks apply to rows of one matrix.

The latter is how ranks apply norms under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plumbline.check.rank.joint.operator_watch import OperatorWatch
from plumbline.check.rank.joint.weights import JointWeights
from plumbline.replay.collectives import is_collective, reaches_others
from plumbline.replay.memory import address_of
from plumbline.replay.nested import tensors_in

T = TypeVar("T")

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_ROUTED = ("index", "gather", "scatter", "take")
"""How the names of operators begin that move rows to places which data decide, as they do behind experts."""


@dataclass(frozen=True)
class _Past:
    """How a value was computed since ranks last communicated.

    ``used``: the parameters used, if all of them are equal on all ranks. ``is_part``: another parameter was used.
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
def followed_uses(weights: JointWeights, parts: Set[int]) -> Iterator[Uses]:
    """Collect how a forward at these weights uses its parameters.

    ``first``: the operators that use them first, in this order. ``on_rows``: those that ranks apply to their rows of
    one matrix. Between two collectives, the forward then uses no parameter in ``parts``, which differ between ranks.
    The second collective gathers the rows, and the next product of matrices contracts the dimension that each rank had
    whole. A parameter of these rows is no part of a longer one, whose entries would belong to that dimension. Rows
    that are moved after they were gathered may come from experts, which are parameters of their own.
    """
    pasts: dict[int, tuple[StorageWeakRef, _Past]] = {}
    found = Uses()

    def past_of(tensor: Tensor) -> _Past:
        return pasts[at][1] if (at := _storage_of(tensor)) in pasts else _Past()

    def after(func: Any, arguments: list[Any], outputs: Any) -> None:
        tensors, changed = list(tensors_in(arguments)), list(tensors_in(outputs))
        owners = [owner for one in tensors if (owner := weights.owner_of(one)) is not None]
        known = [past_of(one) for one in tensors]
        has_schema = isinstance(func, torch._ops.OpOverload)  # unlike FlexAttention and other higher-order operators
        name = func._schema.name.partition("::")[2] if has_schema else str(func)
        for owner in owners:
            found.first.setdefault(owner, name)
        is_part = any(one.is_part for one in known) or not parts.isdisjoint(owners)
        past = _Past(
            frozenset() if is_part else _joined([frozenset(owners), *(one.used for one in known)]),
            is_part,
            _joined([frozenset(), *(one.gathered for one in known)]),
        )
        if name.startswith(_ROUTED):
            past = replace(past, gathered=frozenset())
        if name in _PRODUCTS:
            for one, dimension in ((tensors[-2], -1), (tensors[-1], -2)):
                gathered = past_of(one).gathered
                found.on_rows.update(used for used, *shape in gathered if _contracts(one, dimension, *shape))
            past = replace(past, gathered=frozenset())
        if is_collective(func) and reaches_others(func, arguments):
            past = _exchanged(name, tensors, changed, past)
        for one in changed:
            if address_of(one) and weights.owner_of(one) is None:
                # As long as there is a weak reference, no other storage gets the same number.
                pasts[_storage_of(one)] = StorageWeakRef(one.untyped_storage()), past  # type: ignore[no-untyped-call]

    with OperatorWatch(after=after):
        yield found


def _joined(sets: Sequence[frozenset[T]]) -> frozenset[T]:
    """Return the union of sets, as one of them where possible: a long forward would else hold a copy for each value."""
    most = max(sets, key=len)
    return most if all(one <= most for one in sets) else most.union(*sets)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if address_of(tensor) else 0


def _exchanged(name: str, tensors: Sequence[Tensor], received: Sequence[Tensor], past: _Past) -> _Past:
    sent = [one for one in tensors if all(one is not other for other in received)]
    if "gather" not in name or past.is_part or len(sent) != 1 or not sent[0].numel():
        return _Past()
    width = sent[0].shape[-1] if sent[0].dim() else 1
    rows = sum(one.numel() for one in received) // width
    return _Past(gathered=frozenset((one, rows, width) for one in past.used))


def _contracts(matrix: Tensor, dimension: int, rows: int, width: int) -> bool:
    """Return whether a product over this dimension contracts the columns of a matrix that had this shape.

    The shape of a square matrix does not tell this. Its rows come first, unless it has been transposed.
    """
    is_known = rows != width or dimension == -1
    return is_known and matrix.numel() == rows * width and matrix.shape[dimension] == width
