"""Notes how far the weights are, after each optimizer step, from the result of the same step in float64."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from plumbline.check.evidence.training import Facts, as_real
from plumbline.check.rank.optimizer.optimizer_replay import (
    Guard,
    NeedsOtherRanks,
    NotReplayable,
    ReplayedStep,
    depends_on_others,
    groups_of,
    is_entry_by_entry,
    is_of_torch,
    memory,
    replayed,
    replayed_at_once,
    require_replayable,
    stepping,
)
from plumbline.check.rank.optimizer.replay_together import ReplayTogether, WholeDue
from plumbline.check.rank.optimizer.right_updates import RightUpdates
from plumbline.check.rank.optimizer.twin import is_finite
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.check.rank.tensor_digest import weights_prints
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import is_data_parallel_shard, is_laid_out_otherwise, local

_ENTRIES_TOGETHER = 2**18
"""Entries of small parameters that are replayed together: six float64 copies of them take 12 MiB."""


@dataclass(eq=False)
class _Pending:
    """An optimizer between the beginning and the end of a step. ``why``: why it cannot be judged, "" if it can.

    ``own``: the numbers of the parameters that this rank's step updates: all of them, unless ranks have shares.
    ``coupled``: whether an update depends on other parameters of the optimizer, or on a common random generator.
    """

    optimizer: Optimizer
    why: str = ""
    prints: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    coupled: bool = False
    right: list[RightUpdates] = field(default_factory=list)
    together: dict[int, WholeDue] = field(default_factory=dict)
    unjudged: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    outside: list[int] = field(default_factory=list)


class UpdateReplay(Observer):
    """Replays each step in float64 before it is taken, from the recorded weights, gradients and state.

    Facts of a step, in which parameters have their numbers in the optimizer's groups:
    ``class`` and ``of_torch``: the optimizer's class, and whether it is one of torch.optim's.
    ``why``: why the step as a whole cannot be judged, "" if it can.
    ``hooks``: whether the script has hooks of its own on the step, which can change weights and gradients.
    ``coupled``: whether an update depends on other parameters of the optimizer, or on a common random generator.
    ``parameters``: for each judged parameter: its number, the error, the noise, the norms of the right and of the
    actual update, their scalar product, the distance from the replay in the parameter's own precision (0 for torch's
    own classes), and the size of one rounding. Norms of large parameters are those of projections.
    ``close``: for each parameter that must also match a replay in its own precision, by number: the distance from the
    ``nearest`` such replay, the distance that rounding explains (``tight``), and for each known mistake the distance
    from the actual update to the mistaken one, and from the mistaken one to the right one.
    ``unjudged``: numbers of parameters by the reason.
    ``outside``: parameters with a gradient whose weights changed since the last step of an optimizer that has them, or,
    before the first step, since the first backward pass.
    ``shared``: places in shared memory, by parameter.
    ``rounded``: whether some weights are wrong and all are bfloat16 numbers, although no parameter has that dtype.

    Steps that no rank can replay alone are replayed by all ranks together, on whole parameters.

    Memory: a copy of the weights, and one parameter, or several small ones, with the state in float64; all of them if
    the class is not one of torch's own. If steps are nested, the innermost one is judged. For ZeroRedundancyOptimizer,
    this is the step of the inner optimizer, with this rank's share.
    """

    name = "update"
    essential = True

    def __init__(self, sample: ParameterSample | None = None) -> None:
        self._sample = sample or ParameterSample(0)
        self._together = ReplayTogether()
        self._open: list[_Pending] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._prints: Any = WeakTensorKeyDictionary()  # parameter: its fingerprint after the last step

    def start(self) -> None:
        self.stop()

    def stop(self) -> None:
        self._open.clear()
        self._prints.clear()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Keep the fingerprints of weights that no recorded step has updated yet."""
        every = (one for optimizer in self._optimizers for one in parameters_of(optimizer))
        new = [one for one in every if one not in self._prints and not is_data_parallel_shard(one)]
        self._prints.update(zip(new, weights_prints(new), strict=True))

    def before_step(self, optimizer: Optimizer) -> None:
        self._close(optimizer)  # left from a step that raised
        for outer in self._open:
            outer.why = "this optimizer delegates its step to another optimizer, which is judged instead"
            outer.right.clear()
            outer.together.clear()
        pending = _Pending(optimizer)
        self._open.append(pending)
        parameters = parameters_of(optimizer)
        pending.prints = weights_prints(parameters)
        # The script may change a parameter without a gradient, such as a correction that a forward updates.
        known = zip(parameters, pending.prints, strict=True)
        pending.outside = [
            number
            for number, (one, now) in enumerate(known)
            if one.grad is not None and self._prints.get(one, now) != now
        ]
        try:
            require_replayable(stepping(optimizer))
            try:
                _replay(pending, self._sample)
            except NeedsOtherRanks:
                self._replay_together(pending)
        except NotReplayable as error:
            pending.why = str(error)
            pending.right.clear()
            pending.together.clear()
            pending.outside = []  # a step that evaluates the loss again is seen only after that

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        pending = self._close(optimizer)
        if pending is None:
            return None
        parameters = parameters_of(optimizer)
        prints = weights_prints(parameters)
        self._prints.update(zip(parameters, prints, strict=True))
        places = shared_places(map(local, parameters))
        if not self._is_whole(pending, parameters, skipped=skipped):
            pending.why = pending.why or "not all ranks took the step"
        close: Facts = {}
        rows = [] if skipped or pending.why else _compared(pending, parameters, prints, close)
        return {
            "class": type(stepping(optimizer)).__name__,
            "of_torch": is_of_torch(stepping(optimizer)),
            "why": "the GradScaler skipped the step" if skipped else pending.why,
            "hooks": _has_hooks(optimizer) or _has_hooks(stepping(optimizer)),
            "coupled": pending.coupled,
            "count": len(parameters),
            "parameters": rows,
            "close": close,
            "unjudged": dict(pending.unjudged),
            "outside": pending.outside,
            "shared": {str(number): place for number, place in places.items()},
            "rounded": any(row[1] > 2 * row[2] for row in rows) and _are_bfloat16(parameters),
        }

    def _replay_together(self, pending: _Pending) -> None:
        optimizer = pending.optimizer
        pending.right.clear()
        pending.unjudged.clear()
        numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
        of_torch = is_of_torch(stepping(optimizer))  # these communicate only through DTensors
        numbered = [
            (numbers[id(parameter)], group, parameter)
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if self._sample.has(parameter) and not (of_torch and local(parameter) is parameter)
        ]
        pending.own = {number for number, _, _ in numbered}
        for number, found in self._together.replay(optimizer, numbered, Guard(stepping(optimizer))):
            if isinstance(found, str):
                pending.unjudged[found].append(number)
            else:
                pending.together[number] = found
        if of_torch:
            try:
                _replay(pending, self._sample, among=lambda parameter: local(parameter) is parameter)
            except NotReplayable as error:  # perhaps on this rank alone: the others still rely on it
                pending.unjudged[str(error)] += [n for n, one in enumerate(numbers) if n not in pending.together]

    def _is_whole(self, pending: _Pending, parameters: Sequence[Tensor], *, skipped: bool) -> bool:
        """Return whether all ranks have taken the step, so that whole parameters can be gathered again."""
        held = [parameters[number] for number in pending.together]
        return not held or self._together.all_agree(held, not skipped)

    def _close(self, optimizer: Optimizer) -> _Pending | None:
        """Remove and return an open step of an optimizer, with all steps that began inside it."""
        for index, pending in enumerate(self._open):
            if pending.optimizer is optimizer:
                del self._open[index:]
                return pending
        return None


def _replay(pending: _Pending, sample: ParameterSample, among: Callable[[Tensor], bool] = lambda _: True) -> None:
    optimizer = stepping(pending.optimizer)
    parameters = parameters_of(pending.optimizer)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    guard = Guard(optimizer)
    overlapping = _overlapping(parameters)
    chosen: dict[int, tuple[dict[str, object], Tensor]] = {}
    for group in groups_of(pending.optimizer):
        for parameter in group["params"]:
            number = numbers[id(parameter)]
            if not (sample.has(parameters[number]) and among(parameter)):
                continue
            pending.own.add(number)
            if parameter.grad is None or not local(parameter).numel():
                continue
            if number in overlapping:
                pending.unjudged["another parameter shares its memory"].append(number)
            elif is_laid_out_otherwise(parameter.grad, parameter):
                raise NeedsOtherRanks(
                    "the step reduces a gradient that is laid out over the ranks differently from its weights"
                )
            elif not is_finite(parameter.grad):
                pending.unjudged["its gradient is not finite"].append(number)
            else:
                chosen[number] = group, parameter
    is_all = not pending.unjudged and len(pending.own) == len(parameters)
    at_once = _at_once(optimizer, guard) if is_all else {}
    for number in [one for one in chosen if one in at_once]:
        group, parameter = chosen.pop(number)
        alone = at_once.pop(number)
        pending.coupled |= depends_on_others(optimizer, group, parameter, guard, alone.native)
        pending.right.append(RightUpdates.of(optimizer, [number], [parameter], [alone]))
    for batch in _batches(chosen) if is_entry_by_entry(optimizer) else ([one] for one in chosen):
        group, together = chosen[batch[0]][0], [chosen[number][1] for number in batch]
        after = replayed(optimizer, group, together, guard)
        pending.right.append(RightUpdates.of(optimizer, batch, together, after))


def _batches(chosen: dict[int, tuple[dict[str, object], Tensor]]) -> Iterator[list[int]]:
    """Yield numbers of parameters of one group and dtype that are replayed together, to save calls for small ones."""
    batch: list[int] = []
    entries = 0
    for number, (group, parameter) in chosen.items():
        size, first = local(parameter).numel(), chosen[batch[0] if batch else number]
        is_alike = group is first[0] and (parameter.dtype, parameter.device) == (first[1].dtype, first[1].device)
        if batch and (not is_alike or entries + size > _ENTRIES_TOGETHER):
            yield batch
            batch, entries = [], 0
        batch.append(number)
        entries += size
    if batch:
        yield batch


def _at_once(optimizer: Optimizer, guard: Guard) -> dict[int, ReplayedStep]:
    try:
        return replayed_at_once(optimizer, guard)
    except NeedsOtherRanks:
        raise
    except NotReplayable:  # a single parameter may be
        return {}


def _compared(
    pending: _Pending, parameters: Sequence[Tensor], prints: Sequence[int], close: Facts
) -> list[list[float]]:
    """Return a row for each judged parameter. Fill ``close`` for those that must match a replay in their precision."""
    rows: list[list[float]] = []
    for updates in pending.right:
        rows += (own := updates.rows(parameters))
        if updates.lowers:
            close.update((str(number), {"nearest": row[-2], "tight": row[-1], "others": {}}) for number, *row in own)
    for number, whole in pending.together.items():
        row, close[str(number)] = whole.compared(parameters[number])
        rows.append([number, *row])
    known = {number for numbers in pending.unjudged.values() for number in numbers}
    known.update(pending.together, *(one.numbers for one in pending.right))
    changed = [number for number in pending.own - known if prints[number] != pending.prints[number]]
    rows += ([number, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0] for number in changed)  # the size of the error is unknown
    return sorted(rows)


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _are_bfloat16(parameters: Sequence[Tensor]) -> bool:
    """Return whether all weights are bfloat16 numbers, although they are stored in float32 or float64."""
    own = [as_real(local(parameter.detach())) for parameter in parameters]
    return all(
        one.dtype in (torch.float32, torch.float64) and torch.equal(one.bfloat16().to(one.dtype), one) for one in own
    )


def _overlapping(parameters: Sequence[Tensor]) -> set[int]:
    ranges = []
    for number, parameter in enumerate(parameters):
        own = local(parameter)
        if own.numel() and (start := memory(own)):
            last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
            start += int(own.storage_offset()) * own.element_size()
            ranges.append((start, start + (last + 1) * own.element_size(), number))
    ranges.sort()
    found: set[int] = set()
    end, holder = 0, -1
    for start, stop, number in ranges:
        if start < end:
            found |= {holder, number}
        if stop > end:
            end, holder = stop, number
    return found


def shared_places(tensors: Iterable[Tensor]) -> dict[int, str]:
    """Return each tensor's place in shared memory, by its number. It is the same in every process that shares it.

    A place is the host, the mapped file and the offset in the file. Tensors in a process's own memory or on
    accelerators are left out. If the system has no ``/proc/self/maps``, all tensors are left out.
    """
    addresses = {
        number: tensor.data_ptr()
        for number, tensor in enumerate(tensors)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_shared()  # type: ignore[no-untyped-call]
    }
    if not addresses:
        return {}
    mapped = list(_mappings())
    places = {}
    for number, address in addresses.items():
        for start, end, offset, file in mapped:
            if start <= address < end:
                places[number] = f"{platform.node()} {file} {offset + address - start}"
    return places


def _mappings() -> Iterable[tuple[int, int, int, str]]:
    """Yield the begin, the end, the offset and the file of each shared mapping (proc(5))."""
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, modes, offset, device, inode, *path = line.split(maxsplit=5)
                if modes.endswith("s") and inode != "0":
                    start, end = (int(number, 16) for number in addresses.split("-"))
                    yield start, end, int(offset, 16), " ".join([device, inode, *(part.strip() for part in path)])
    except OSError:
        return
