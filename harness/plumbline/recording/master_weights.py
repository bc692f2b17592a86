"""Optimizers that hold copies of a model's parameters, whole or in pieces: which piece of which parameter lies where.

Mixed-precision trainers copy 16-bit weights to float32 ones, and ZeRO gives each rank a run of all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MOST_STARTS = 4096
"""Places in a parameter that are tried as the first one of a flat copy, which may begin inside of it."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Entries of a model's parameter, from ``start`` on, that an optimizer's parameter holds from ``offset`` on.

    ``part`` counts the sets of parameters with which the optimizer steps one after the other: DeepSpeed's engine steps
    once for each group.
    """

    parameter: Tensor
    start: int
    length: int
    master: Tensor
    offset: int
    part: int = 0

    def of(self, values: Tensor) -> Tensor:
        """Return this piece of what has the shape of the optimizer's parameter, such as its gradient."""
        return values.reshape(-1).narrow(0, self.offset, self.length)

    def within(self, parameters: Sequence[Tensor]) -> Piece:
        """Return the piece as it lies in one of ``parameters``, if ``master`` is only a view of that."""
        for one in parameters:
            if one is not self.master and (begin := _start_in(one, self.master)) is not None:
                return replace(self, master=one, offset=self.offset + begin)
        return self

    @property
    def model_weights(self) -> Tensor:
        """The weights with which this rank's model computes."""
        sharded: Any = self.parameter
        own: Tensor | None = getattr(sharded, "ds_tensor", None)
        if own is None:
            return self.parameter.detach().reshape(-1).narrow(0, self.start, self.length)
        begin = sharded.ds_zero_partition_rank * sharded.partition_numel()
        return own.detach().reshape(-1).narrow(0, self.start - begin, self.length)

    @property
    def distance(self) -> float:
        """How far the model's weights are from the optimizer's, relative to their length."""
        master = self.of(self.master.detach()).double()
        return float((self.model_weights.double() - master).norm() / master.norm().clamp_min(1e-30))

    @property
    def off_master(self) -> float:
        """How far the model's weights are from the optimizer's, where they are not the nearest numbers of their dtype.

        It is relative to the optimizer's weight, and the largest of all entries; 0 if each is the nearest number.
        """
        weights, master = self.model_weights, self.of(self.master.detach())
        if _is_copy(weights, master):
            return 0.0
        apart, least = ((one.double() - master.double()).abs() for one in (weights, master.to(weights.dtype)))
        further = apart > least  # not where a master is halfway between two numbers
        return float((further * apart / master.double().abs().clamp_min(torch.finfo(weights.dtype).tiny)).max())

    @property
    def is_stale(self) -> bool:
        """Whether the model computes with other weights than those that the optimizer updates, rounded."""
        return not _is_copy(self.model_weights, self.of(self.master.detach()))


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter, of the whole one where DeepSpeed's ZeRO 3 shards it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def pieces_of(model: Sequence[Tensor], masters: Sequence[Tensor], *, guess: bool = False) -> list[Piece]:
    """Return the pieces of a model's parameters that an optimizer holds: views, by DeepSpeed's own maps, or by values.

    Args:
        model: parameters of the model that are in no optimizer.
        masters: the parameters of an optimizer, none of which is the model's.
        guess: whether parameters of equal values, as of zeros, may be told apart by their order. After a step they have
            other values.
    """
    if views := _views(model, masters):
        return views
    known = list(_of_deepspeed(model, masters))
    if known and not any(one.is_stale for one in known):
        return known  # they are wrong where gradients are divided in another order, or the weights are stale
    found = _whole_copies(model, masters) or _flat_copies(model, masters)
    if not guess and not _is_certain(model, found):
        return []
    if not found and guess and [one.shape for one in model] == [one.shape for one in masters]:
        found = [Piece(one, 0, one.numel(), master, 0) for one, master in zip(model, masters, strict=True)]
    return found


def likely_pieces(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return pieces that are whole parameters: of equal values if there are such, of equal shapes otherwise.

    Several that may be meant, such as biases of zeros, are taken in the model's order. Optimizers order parameters by
    group, and the model's order remains in each; it is reversed where most of the others are. Nothing is returned if
    shapes differ.
    """
    left = list(range(len(model)))
    found: dict[int, int] = {}
    for place, master in enumerate(masters):
        equal = [number for number in left if _is_whole_copy(model[number], master)]
        if len(equal) == 1:
            found[place] = equal[0]
            left.remove(equal[0])
    steps = [later - before for before, later in pairwise(found[place] for place in sorted(found))]
    pick = max if 2 * sum(step < 0 for step in steps) > len(steps) else min
    for place, master in enumerate(masters):
        if place not in found:
            same = [number for number in left if model[number].shape == master.shape]
            equal = [number for number in same if _is_whole_copy(model[number], master)]
            if not same:
                return []
            found[place] = pick(equal or same)
            left.remove(found[place])
    return [Piece(model[found[place]], 0, master.numel(), master, 0) for place, master in enumerate(masters)]


def _is_certain(model: Sequence[Tensor], pieces: Sequence[Piece]) -> bool:
    """Return whether no piece may be one of another parameter: values, or the pieces beside it, say which it is."""
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
    """Return the pieces of masters that are all views of the model's parameters, as Megatron's distributed ones."""
    pieces = []
    for master in masters:
        places = ((one, _start_in(one, master)) for one in model)
        found = next(((one, start) for one, start in places if start is not None), None)
        if found is None:
            return []
        pieces.append(Piece(found[0], found[1], master.numel(), master, 0))
    return pieces


def _start_in(whole: Tensor, part: Tensor) -> int | None:
    """Return the entry of ``whole`` at which ``part`` begins, which is a view of some of its entries; None if not."""
    if whole.dtype != part.dtype or not part.numel() or not (whole.is_contiguous() and part.is_contiguous()):
        return None
    start = int(part.storage_offset()) - int(whole.storage_offset())
    return start if _holds(whole, part) and 0 <= start <= whole.numel() - part.numel() else None


def _holds(whole: Tensor, part: Tensor) -> bool:
    return whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def _is_copy(weights: Tensor, master: Tensor) -> bool:
    return torch.equal(weights, master.to(weights.dtype))


def _whole_copies(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return pieces that are whole parameters, which have the shapes and the values of masters."""
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
    """Return numbers of parameters, first those beside the last one."""
    return sorted(numbers, key=lambda number: (number != last + 1, number != last - 1, number))


def _flat_copies(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return pieces of flat masters, each of which has one parameter after the other."""
    flat = [one.detach().reshape(-1) for one in model]
    found: list[Piece] = []
    for master in masters:
        runs = _runs(flat, master.detach()) if master.dim() == 1 else []
        if not runs:
            return []
        found += [Piece(model[place], start, size, master, offset) for place, start, size, offset in runs]
    return found


Run = tuple[int, int, int, int]
"""The number of a parameter, the first entry of it, how many follow, and where they lie in the flat master."""


def _runs(flat: Sequence[Tensor], master: Tensor) -> list[Run]:
    """Return which runs of parameters make up a flat master: all of its entries but zeros between."""
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
    """Return the runs that follow the first one, those of the next parameter or of the one before it if they fit."""
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
    """Return how many entries of a flat master begin with those of a parameter: all of the shorter one, or none."""
    size = min(values.numel(), master.numel())
    return size if _is_copy(values[:1], master[:1]) and _is_copy(values[:size], master[:size]) else 0


def _zeros(values: Tensor) -> int:
    """Return how many zeros values begin with."""
    others = values.nonzero()
    return int(others[0]) if len(others) else values.numel()
