"""Optimizers with master weights, whole or partial copies of a model's parameters: which copy belongs to which entries.

Mixed-precision trainers copy 16-bit weights to float32, and ZeRO gives each rank a contiguous range of all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MOST_STARTS = 4096
"""The largest number of positions in a parameter that are tried as the beginning of a flat copy."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Entries of a model's parameter, from ``start`` on, that the optimizer's ``master`` holds from ``offset`` on.

    ``part`` numbers the sets of parameters that the optimizer steps one after another: DeepSpeed's engine steps once
    for each group.
    """

    parameter: Tensor
    start: int
    length: int
    master: Tensor
    offset: int
    part: int = 0

    def of(self, values: Tensor) -> Tensor:
        """Return this piece of ``values``, which has the shape of ``master``, such as its gradient."""
        return values.reshape(-1).narrow(0, self.offset, self.length)

    def within(self, parameters: Sequence[Tensor]) -> Piece:
        """Return the piece with one of ``parameters`` as its master, if ``master`` is only a view of that parameter."""
        for one in parameters:
            if one is not self.master and (begin := _start_in(one, self.master)) is not None:
                return replace(self, master=one, offset=self.offset + begin)
        return self

    @property
    def model_weights(self) -> Tensor:
        """The weights of this piece with which the model on this rank computes."""
        sharded: Any = self.parameter
        own: Tensor | None = getattr(sharded, "ds_tensor", None)
        if own is None:
            return self.parameter.detach().reshape(-1).narrow(0, self.start, self.length)
        begin = sharded.ds_zero_partition_rank * sharded.partition_numel()
        return own.detach().reshape(-1).narrow(0, self.start - begin, self.length)

    @property
    def distance(self) -> float:
        """The distance of the model's weights from the master weights, relative to the norm of the master weights."""
        master = self.of(self.master.detach()).double()
        return float((self.model_weights.double() - master).norm() / master.norm().clamp_min(1e-30))

    @property
    def off_master(self) -> float:
        """The largest error of a model weight that is not the nearest number of its dtype to its master weight.

        It is relative to the master weight; 0 if every weight is the nearest number.
        """
        weights, master = self.model_weights, self.of(self.master.detach())
        if _is_copy(weights, master):
            return 0.0
        apart, least = ((one.double() - master.double()).abs() for one in (weights, master.to(weights.dtype)))
        further = apart > least  # not where a master is halfway between two numbers
        return float((further * apart / master.double().abs().clamp_min(torch.finfo(weights.dtype).tiny)).max())

    @property
    def is_stale(self) -> bool:
        """Whether the model's weights differ from the rounded master weights."""
        return not _is_copy(self.model_weights, self.of(self.master.detach()))


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter; the full shape if DeepSpeed's ZeRO 3 shards it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def pieces_of(model: Sequence[Tensor], masters: Sequence[Tensor], *, guess: bool = False) -> list[Piece]:
    """Return the pieces of a model's parameters that an optimizer holds, from views, DeepSpeed's maps, or values.

    Args:
        model: parameters of the model that are in no optimizer.
        masters: the parameters of an optimizer, none of which is the model's.
        guess: whether parameters with equal values, such as zeros, may be matched by their order. After a step their
            values differ.
    """
    if views := _views(model, masters):
        return views
    known = list(_of_deepspeed(model, masters))
    if known and not any(one.is_stale for one in known):
        return known  # else gradients are divided in another order, or the weights are stale
    found = _whole_copies(model, masters) or _flat_copies(model, masters)
    if not guess and not _is_certain(model, found):
        return []
    if not found and guess and [one.shape for one in model] == [one.shape for one in masters]:
        found = [Piece(one, 0, one.numel(), master, 0) for one, master in zip(model, masters, strict=True)]
    return found


def likely_pieces(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Match each master to a whole parameter with equal values or, if there is none, with the same shape.

    If several parameters match, such as biases of zeros, they are taken in the model's order. Optimizers order
    parameters by group, and keep the model's order within a group. The order is reversed if most of the other matches
    are in reversed order. The result is empty if shapes do not match.
    """
    left = list(range(len(model)))
    found: dict[int, int] = {}
    for index, master in enumerate(masters):
        equal = [number for number in left if _is_whole_copy(model[number], master)]
        if len(equal) == 1:
            found[index] = equal[0]
            left.remove(equal[0])
    steps = [later - before for before, later in pairwise(found[index] for index in sorted(found))]
    pick = max if 2 * sum(step < 0 for step in steps) > len(steps) else min
    for index, master in enumerate(masters):
        if index not in found:
            same = [number for number in left if model[number].shape == master.shape]
            equal = [number for number in same if _is_whole_copy(model[number], master)]
            if not same:
                return []
            found[index] = pick(equal or same)
            left.remove(found[index])
    return [Piece(model[found[index]], 0, master.numel(), master, 0) for index, master in enumerate(masters)]


def _is_certain(model: Sequence[Tensor], pieces: Sequence[Piece]) -> bool:
    """Return whether no piece can belong to another parameter, judging by its values or by the adjacent pieces."""
    constant = [_is_constant(one.model_weights) for one in pieces]
    numbers = {id(one): number for number, one in enumerate(model)}
    order = [numbers[id(one.parameter)] for one in pieces]
    apart = {later - before for before, later in pairwise(order)}
    return not any(constant) or (not all(constant) and (apart <= {1} or apart <= {-1}))


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _of_deepspeed(model: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[Piece]:
    for one in model:
        zero: Any = getattr(one, "_z3_optimizer", None)
        fragment: Any = getattr(one, "_hp_mapping", None)
        if zero is not None:
            sharded: Any = one
            part, offset, size = zero.grad_position[zero.get_param_id(one)]
            start = sharded.ds_zero_partition_rank * size
            length = min(size, sharded.ds_numel - start)
            master = zero.fp32_partitioned_groups_flat[part]
        elif fragment is not None:
            low, high = fragment.lp_fragment_address, fragment.hp_fragment_address
            part, start, length = fragment.param_group_index, low.start, low.numel
            whole = next((whole for whole in masters if _holds(whole, fragment.hp_fragment)), None)
            master, offset = (fragment.hp_fragment, 0) if whole is None else (whole, high.start)
        else:
            continue
        if length > 0:
            yield Piece(one, start, length, master, offset, part)


def _views(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return the pieces if all masters are views of the model's parameters, as in Megatron's distributed optimizer."""
    pieces = []
    for master in masters:
        places = ((one, _start_in(one, master)) for one in model)
        found = next(((one, start) for one, start in places if start is not None), None)
        if found is None:
            return []
        pieces.append(Piece(found[0], found[1], master.numel(), master, 0))
    return pieces


def _start_in(whole: Tensor, part: Tensor) -> int | None:
    """Return the entry of ``whole`` at which its view ``part`` begins; None if it is no such view."""
    if whole.dtype != part.dtype or not part.numel() or not (whole.is_contiguous() and part.is_contiguous()):
        return None
    start = int(part.storage_offset()) - int(whole.storage_offset())
    return start if _holds(whole, part) and 0 <= start <= whole.numel() - part.numel() else None


def _holds(whole: Tensor, part: Tensor) -> bool:
    return whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def _is_copy(weights: Tensor, master: Tensor) -> bool:
    return torch.equal(weights, master.to(weights.dtype))


def _whole_copies(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return pieces that are whole parameters with the shapes and the values of the masters."""
    left = list(range(len(model)))
    pieces = []
    last = -1
    for master in masters:
        found = next((number for number in _nearest(left, last) if _is_whole_copy(model[number], master)), None)
        if found is None:
            return []
        left.remove(found)
        last = found
        pieces.append(Piece(model[found], 0, model[found].numel(), master, 0))
    return pieces


def _is_whole_copy(weights: Tensor, master: Tensor) -> bool:
    return weights.shape == master.shape and _is_copy(weights.detach(), master.detach())


def _nearest(numbers: Sequence[int], last: int) -> list[int]:
    """Return the numbers of parameters, those next to ``last`` first."""
    return sorted(numbers, key=lambda number: (number != last + 1, number != last - 1, number))


def _flat_copies(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return pieces of flat masters, each of which concatenates parameters."""
    flat = [one.detach().reshape(-1) for one in model]
    found: list[Piece] = []
    for master in masters:
        runs = _runs(flat, master.detach()) if master.dim() == 1 else []
        if not runs:
            return []
        found += [Piece(model[place], start, size, master, offset) for place, start, size, offset in runs]
    return found


Run = tuple[int, int, int, int]
"""The number of a parameter, its first entry, the number of entries, and their offset in the flat master."""


def _runs(flat: Sequence[Tensor], master: Tensor) -> list[Run]:
    """Return the runs of parameters that make up a flat master, apart from zeros between them; else an empty list."""
    for number, values in enumerate(flat):
        starts = (values == master[:1].to(values.dtype)).nonzero().flatten().tolist() if master.numel() else []
        for start in starts[:MOST_STARTS]:
            size = min(values.numel() - start, master.numel())
            if _is_copy(values[start : start + size], master[:size]):
                runs = _followed(flat, master, (number, start, size, 0))
                if runs:
                    return runs
    return []


def _followed(flat: Sequence[Tensor], master: Tensor, first: Run) -> list[Run]:
    """Return ``first`` and the runs after it, in adjacent parameters if they fit; an empty list if none fits."""
    runs, left = [first], [number for number in range(len(flat)) if number != first[0]]
    while (offset := runs[-1][3] + runs[-1][2]) < master.numel():
        order = _nearest(left, runs[-1][0])
        padded = offset + _zeros(master[offset:])
        places = ((number, at) for at in dict.fromkeys((offset, padded)) for number in order)
        run = next(((number, 0, _fits(flat[number], master[at:]), at) for number, at in places
                    if _fits(flat[number], master[at:])), None)  # fmt: skip
        if run is None:
            return runs if padded == master.numel() else []
        runs.append(run)
        left.remove(run[0])
    return runs


def _fits(values: Tensor, master: Tensor) -> int:
    """Return how many leading entries a parameter and a flat master share: all of the shorter one, or 0."""
    size = min(values.numel(), master.numel())
    return size if _is_copy(values[:1], master[:1]) and _is_copy(values[:size], master[:size]) else 0


def _zeros(values: Tensor) -> int:
    others = values.nonzero()
    return int(others[0]) if len(others) else values.numel()
