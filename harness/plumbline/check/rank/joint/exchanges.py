"""The script's own autograd functions by which its loss communicates, each with its own backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from weakref import ref

import torch
import torch.distributed
from torch import Tensor

from plumbline.check.rank.joint.copies_and_parts import LIMIT
from plumbline.check.rank.joint.meetings import Meetings
from plumbline.check.rank.joint.weights import STEP
from plumbline.check.rank.store_exchange import Exchange
from plumbline.recording.backward_passes import in_backward
from plumbline.recording.observer import Facts
from plumbline.recording.pause import is_paused
from plumbline.replay.applied_functions import follow_functions
from plumbline.replay.collectives import collectives, group_of, members_of_groups
from plumbline.replay.draws import Draws
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.precision import ReplayPrecision, default_dtype
from plumbline.replay.random_state import RandomState, drawn_from, normal
from plumbline.replay.replay_modes import WideMode

MOST = 16
"""The most calls compared at each step, and the most ranks whose inputs are moved one rank at a time."""

RIGHT, PART, MULTIPLE, OWN, LINEAR = "right", "part", "multiple", "own", "linear"
"""The backward is the derivative of the forward, this derivative divided by the number of ranks that communicate,
multiplied by it, or the derivative of the rank's own outputs alone. Or it is none of these, nor a multiple of the
derivative, although the forward is linear: no other backward can be meant, as in a straight-through estimator."""

_OF_TORCH = "torch.distributed.nn"
"""The module with torch's own functions by which a loss can communicate."""

IsInside = Callable[[], bool]
"""Returns whether a tracked call runs, whose whole forward is computed again."""


@dataclass
class Exchanged:
    """A call of such a function, with its inputs.

    ``ranks``: how many ranks communicate with each other. ``drawn``: the generator states from which it drew random
    numbers. ``node``: a weak reference to its node in the script's graph. ``arrived``: for each backward pass, the
    gradients that its backward returned, and those that arrived at its outputs.
    """

    kind: Any
    args: tuple[Any, ...]
    inputs: list[Tensor]
    ranks: int
    drawn: RandomState
    node: Callable[[], Any]
    arrived: list[tuple[Sequence[Tensor | None], Sequence[Tensor | None]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.kind.__name__)

    def outputs(self, moved: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Run the function again in float64 with moved inputs; ``moved`` gets the number of each input.

        Its own casts, such as Megatron's to float32, would round away the small differences, so they are widened, too.
        """
        numbers = iter(range(len(self.inputs)))

        def replaced(one: Tensor) -> Tensor:
            wide = one.to(torch.float64) if one.is_floating_point() else one
            return moved(next(numbers), wide).clone()

        usual = next((one.dtype for one in self.inputs if one.is_floating_point()), torch.get_default_dtype())
        precision = ReplayPrecision.FLOAT64
        mode = WideMode(precision, Draws(precision, repeat(usual), usual, torch.get_default_dtype()))
        mode.may_communicate = True
        try:
            with torch.no_grad(), drawn_from(self.drawn), default_dtype(torch.float64), mode:
                return list(tensors_in(self.kind.apply(*map_tensors(self.args, replaced))))
        finally:
            mode.put_back()


class ExchangeFunctions:
    """Records the calls of custom autograd functions that communicate, outside of tracked modules."""

    def __init__(self) -> None:
        self.is_inside: IsInside = lambda: False
        self._calls: list[Exchanged] = []
        self._has_communicated = False
        self._end: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start following such functions."""
        self._end = follow_functions(self._applied)

    def stop(self) -> None:
        """Stop following them."""
        self._end()
        self._calls = []

    def take(self) -> list[Exchanged]:
        """Return the calls since the last time whose backward ran exactly once, at most ``MOST``."""
        calls, self._calls = self._calls, []
        return [one for one in calls if len(one.arrived) == 1][:MOST]

    def take_has_communicated(self) -> bool:
        """Return whether any function has communicated since the last time, even with only some ranks."""
        has_communicated, self._has_communicated = self._has_communicated, False
        return has_communicated

    def _applied(self, run: Callable[..., Any], kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self._attends(kind):
            return run(*args, **kwargs)
        before = collectives()
        if kwargs or kind.__module__.startswith("torch."):  # its backward is not compared
            result = run(*args, **kwargs)
            self._has_communicated |= bool(_with_graph(result)) and collectives() != before
            return result
        copies = map_tensors(args, _copy_of_input)
        inputs = list(tensors_in(copies))
        drawn = RandomState.now(one.device for one in inputs)
        result = run(*args)
        after = collectives()
        if after != before and (outputs := _with_graph(result)):
            self._has_communicated = True
            node = outputs[0].grad_fn
            self._follow(Exchanged(kind, copies, inputs, _ranks_of(before, after), drawn, ref(node)), node)
        return result

    def _attends(self, kind: Any) -> bool:
        outside = not (self.is_inside() or is_paused() or in_backward())
        is_ours = kind.__module__.startswith(("torch.", "plumbline.")) and not kind.__module__.startswith(_OF_TORCH)
        return outside and torch.is_grad_enabled() and not is_ours

    def _follow(self, call: Exchanged, node: Any) -> None:
        # Drop calls whose graph is gone, such as those of an evaluation with gradients enabled.
        self._calls = [one for one in self._calls if one.arrived or one.node() is not None] + [call]
        weak = ref(call)  # the script's graph may outlive the record
        cotangents: list[Tensor | None] = []

        def arrives(arriving: Sequence[Tensor | None]) -> None:
            cotangents[:] = _copied(arriving)  # the backward may change them, as an all-reduce in place does

        def arrived(given: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
            one = weak()
            if one is not None and not is_paused():
                one.arrived.append((_copied(given), [*cotangents]))
            cotangents.clear()

        node.register_prehook(arrives)
        node.register_hook(arrived)


def shared_by(functions: Sequence[Facts]) -> tuple[int, bool]:
    """Return how many ranks compute a loss together, 1 if unknown, and whether each has its part of the derivative."""
    sizes = {one["ranks"] for one in functions}
    return (sizes.pop() if len(sizes) == 1 else 1), all(one["is"] == PART for one in functions)


def compared_calls(exchange: Exchange, meetings: Meetings, calls: Sequence[Exchanged]) -> list[Facts]:
    """Compare the backward of each function with differences of its forward, together with all ranks.

    Functions that get the same inputs on two ranks are left out: their right gradient depends on later operations. So
    are those that communicate in groups of different sizes.
    """
    theirs = exchange.values([[one.name, one.ranks] for one in calls])
    if any(own != theirs[0] for own in theirs):
        return []
    found = []
    for number, call in enumerate(calls):
        every = exchange.values(_attempted(meetings, call, number))
        fact = _found(call, every) if call.ranks and all(every) else None
        if fact is not None and fact["is"] == "" and len(every) <= MOST:
            alone = [exchange.values(_attempted(meetings, call, number, only=rank))[rank] for rank in range(len(every))]
            if all(alone) and all(_agree(one, one["received"], one["right"]) for one in alone):
                fact["is"] = OWN
        if fact is not None and fact["is"] == "":
            others = exchange.values(_attempted(meetings, call, number, length=1.0))
            if all(others) and _is_linear(others) and not _are_multiples(every, others):
                fact["is"] = LINEAR
        found += [fact] if fact is not None else []
    return found


def _attempted(
    meetings: Meetings, call: Exchanged, seed: int, only: int | None = None, length: float = STEP
) -> dict[str, float] | None:
    try:
        with meetings.held():
            return _terms(call, seed, only, length)
    except Exception:
        return None


def _terms(call: Exchanged, seed: int, only: int | None, length: float) -> dict[str, float]:
    """Return this rank's terms of the right and the received derivative along a random direction, and of their noise.

    ``only``: the only rank whose inputs move; None to move those of all ranks. ``length``: by how much they move; each
    length has its own direction.
    """
    ((given, cotangents),) = call.arrived
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1 + 1000 * seed + rank + (length != STEP) * 2**20)
    along = [_direction(one, generator) if one.requires_grad and only in (None, rank) else None for one in call.inputs]

    def moved_by(length: float) -> list[Tensor]:
        def moved(number: int, one: Tensor) -> Tensor:
            direction = along[number]
            return one if direction is None else one + length * direction

        return call.outputs(moved)

    forth, still, back = moved_by(length), moved_by(0.0), moved_by(-length)
    outputs = [
        (a, c, b, v.to(a.dtype)) for a, c, b, v in zip(forth, still, back, cotangents, strict=True) if v is not None
    ]
    right = [(a - b) / (2 * length) * v for a, _, b, v in outputs]
    # Where a kink is crossed, or where the function rounds its results after all, both sides differ.
    bends = [(a + b - 2 * c) / (2 * length) * v for a, c, b, v in outputs]
    received = [g.to(d.dtype) * d for g, d in zip(given, along, strict=True) if g is not None and d is not None]
    size = sum(float(a.norm() * v.norm()) for a, _, _, v in outputs)
    units = [torch.finfo(one.dtype).eps / 2 for one in (*given, *cotangents) if one is not None]
    return {
        "right": sum(float(one.sum()) for one in right),
        "received": sum(float(one.sum()) for one in received),
        "squares": sum(float(one.square().sum()) for one in (*right, *received)),
        "cancelled": 2.0**-52 * size / length,
        "bent": sum(float(one.norm() + one.sum().abs()) for one in bends),
        "unit": max(units, default=0.0),
        "inputs": sum(float((one.detach().double() * d).sum()) for one, d in _pairs(call)),
    }


def _found(call: Exchanged, every: Sequence[dict[str, float]]) -> Facts | None:
    """Return how a function's backward relates to its derivative: ``is`` names the relation, "" if it is unknown yet.

    None if ranks have equal inputs, or derivatives are too small to tell.
    """
    if len({one["inputs"] for one in every}) < len(every):
        return None
    total = _total(every)
    ranks, right, received, noise = call.ranks, total["right"], total["received"], _noise(total)
    if not math.isfinite(noise) or max(abs(right), abs(received)) <= 2 * LIMIT * noise:
        return None
    related = {RIGHT: (received, right), PART: (received, right / ranks), MULTIPLE: (received, right * ranks)}
    which = next((kind for kind, values in related.items() if _agree(total, *values)), "")
    return {"function": call.name, "ranks": ranks, "error": abs(received - right) / noise, "is": which}


def _total(every: Sequence[dict[str, float]]) -> dict[str, float]:
    unit = max(one["unit"] for one in every)
    return {kind: unit if kind == "unit" else math.fsum(one[kind] for one in every) for kind in every[0]}


def _is_linear(every: Sequence[dict[str, float]]) -> bool:
    """Return whether the differences of a forward over long ways show no bend."""
    return all(one["bent"] <= LIMIT * one["cancelled"] for one in every)


def _are_multiples(*directions: Sequence[dict[str, float]]) -> bool:
    """Return whether one factor turns the right derivatives along two directions into the received ones."""
    one, other = map(_total, directions)
    noise = math.hypot(other["right"] * _noise(one), one["right"] * _noise(other))
    return abs(one["received"] * other["right"] - other["received"] * one["right"]) <= LIMIT * noise


def _noise(terms: dict[str, float]) -> float:
    return math.hypot(terms["unit"] * math.sqrt(terms["squares"]), terms["cancelled"], 4 * terms["bent"] / LIMIT)


def _agree(terms: dict[str, float], one: float, other: float) -> bool:
    return abs(one - other) <= LIMIT * _noise(terms)


def _pairs(call: Exchanged) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)  # the same on all ranks: equal inputs are recognised
    for one in call.inputs:
        if one.requires_grad:
            yield one, _direction(one, generator)


def _direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    size = float(tensor.detach().double().square().mean().sqrt()) or 1.0
    return normal(tensor.shape, generator).to(tensor.device) * size


def _copy_of_input(one: Tensor) -> Tensor:
    return one.detach().clone().requires_grad_(one.requires_grad)


def _copied(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if one is None else one.detach().clone() for one in gradients]


def _with_graph(result: Any) -> list[Tensor]:
    return [one for one in tensors_in(result) if one.grad_fn is not None]


def _ranks_of(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the size of the group in which all collectives between two counts communicated, 0 for several groups."""
    members = members_of_groups()
    groups = [members.get(group_of(name), []) for name, count in after.items() if count != before.get(name, 0)]
    return len(groups[0]) if all(one == groups[0] for one in groups) else 0
