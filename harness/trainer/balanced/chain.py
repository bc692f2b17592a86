"""The blocks of a user's module, found by running a step: where it can be cut, and what each block needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.trainer.balanced.blocks import Block, held_tensors, tensors_in
from harness.trainer.balanced.calls import Interception, ModuleCall, Part, calls_of, open_up, record_calls
from harness.trainer.balanced.elsewhere import is_missing
from harness.trainer.errors import MisconfigurationError

Step = Callable[[], Any]


@dataclass(frozen=True)
class CallRange:
    """Consecutive calls from ``first`` on, up to the next block's first.

    ``arriving`` numbers the tensors among the arguments of its first call that come from the block before; ``holds``
    names the parameters and buffers that it uses.
    """

    name: str
    first: int
    arriving: tuple[int, ...]
    holds: frozenset[str]


@dataclass(frozen=True)
class Chain:
    """The blocks of a step; ``calls`` names the module of each call that blocks are made of."""

    calls: tuple[str, ...]
    blocks: tuple[CallRange, ...]

    def part(self, first: int, last: int) -> Part:
        """Return the part of a step that is blocks ``first`` to ``last - 1``."""
        begin = self.blocks[first]
        if last == len(self.blocks):
            return Part(begin.first, len(self.calls), begin.arriving, ())
        return Part(begin.first, self.blocks[last].first, begin.arriving, self.blocks[last].arriving)

    def holds(self, first: int, last: int) -> frozenset[str]:
        """Return the names of the parameters and buffers that blocks ``first`` to ``last - 1`` use."""
        return frozenset().union(*(block.holds for block in self.blocks[first:last]))

    def runnable(self, interception: Interception, step: Callable[[Any], Any]) -> list[Block]:
        """Return the blocks one by one as functions of what arrives and of the inputs of ``step``."""

        def run(number: int, value: Any, inputs: Any) -> Any:
            arrived = [] if number == 0 else value
            return interception.run(self.part(number, number + 1), arrived, lambda: step(inputs))

        return [
            Block(block.name, partial(run, number), tuple(sorted(block.holds)))
            for number, block in enumerate(self.blocks)
        ]

    def interception(self, module: nn.Module, device: torch.device) -> Interception:
        """Return what runs parts of the steps of ``module``."""
        modules = dict(module.named_modules())
        return Interception([(name, modules[name]) for name in self.calls], device, remember=True)


@dataclass
class _Start:
    """A block that may begin at call ``first``: what could travel to it, and what it turned out to need."""

    first: int
    inputs: list[Tensor] = field(default_factory=list)
    arriving: tuple[int, ...] = ()
    used: frozenset[int] = frozenset()


def find_chain(
    module: nn.Module,
    step: Step,
    devices: int,
    device: torch.device,
    declared: Sequence[nn.Module] | None = None,
    least: int | None = None,
) -> Chain:
    """Run ``step`` and parts of it, and return its blocks.

    Blocks are calls of modules: those ``declared``, or else the largest ones of which none has more than a device's
    share of the weights. Where a later block needs more than its own arguments from earlier ones, as with a skip
    connection around it, the blocks in between become one. Parameters and buffers are not changed, and random numbers
    are drawn as if nothing had run.

    Raises:
        MisconfigurationError: There are fewer blocks than ``least``; None: than devices.

    """
    with undisturbed(module, device), torch.no_grad():
        calls = record_calls(module, step)
        if declared is not None:
            calls = calls_of(calls, declared)
        else:
            calls = open_up(calls, sum(parameter.numel() for parameter in module.parameters()) / devices)
        starts, reason = _cut(module, step, calls, device) if calls else ([], None)
    starts = _joined(starts, calls)
    if len(starts) < (devices if least is None else least):
        raise MisconfigurationError(
            f"{type(module).__name__} can be cut into {len(starts)} blocks ({_names(starts, calls)}), too few for "
            f"{devices} devices: use fewer gpus, or return from configure_blocks the modules that the step calls one "
            f"after the other, each on the output of the one before.{f' ({reason})' if reason else ''}"
        ) from reason
    return Chain(tuple(call.name for call in calls), tuple(_blocks(module, starts, calls)))


def _cut(
    module: nn.Module, step: Step, calls: list[ModuleCall], device: torch.device
) -> tuple[list[_Start], Exception | None]:
    """Return where blocks can begin, and the last reason why one could not."""
    interception = Interception([(call.name, call.module) for call in calls], device, remember=False)
    starts, last, reason = [_Start(0)], 1, None
    with interception.installed():
        while True:
            start = starts[-1]
            part = Part(start.first, last, None if start.first else (), None if last < len(calls) else ())
            interception.inputs = start.inputs
            try:
                with Uses(interception) as uses:
                    outputs = interception.run(part, start.inputs, step)
                start.arriving, start.used = interception.used_inputs if start.first else (), frozenset(uses.seen)
                complete = last < len(calls) or not any(map(is_missing, tensors_in(outputs)))
                fault = None
            except Exception as error:
                complete, fault = False, error
            if start.first and any(is_missing(start.inputs[number]) for number in interception.used_inputs):
                # The block before had not been given what this one needs.
                starts.pop()
                starts.pop()
                last, reason = start.first, fault
            elif start.first and not (complete and start.arriving):
                starts.pop()  # what follows needs more than what travels here
                reason = fault
            elif fault is not None:
                raise fault
            elif last == len(calls):
                return starts, reason
            else:
                starts.append(_Start(last, outputs))
                last += 1


class Uses(TorchFunctionMode):
    """Notes the tensors that a part of a step computes with, by id."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self.interception = interception
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the tensors in the arguments, unless the result is for another stage."""
        tensors = tensors_in((args, kwargs or {}))
        if not self.interception.skipping and not any(map(is_missing, tensors)):
            self.seen.update(map(id, tensors))
        return func(*args, **(kwargs or {}))


def _joined(starts: list[_Start], calls: list[ModuleCall]) -> list[_Start]:
    """Return the starts without those that would part two calls of one module with buffers: one stage has them."""
    spans: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        if next(call.module.buffers(), None) is not None:
            spans.setdefault(id(call.module), []).append(number)
    parted = [start for start in starts if any(numbers[0] < start.first <= numbers[-1] for numbers in spans.values())]
    kept: list[_Start] = []
    for start in starts:
        if start in parted and kept:
            kept[-1].used |= start.used
        else:
            kept.append(start)
    return kept


def _blocks(module: nn.Module, starts: list[_Start], calls: list[ModuleCall]) -> Iterator[CallRange]:
    tensors = held_tensors(module)
    in_calls = {id(tensor) for call in calls for tensor in (*call.module.parameters(), *call.module.buffers())}
    for start, last in zip(starts, _lasts(starts, calls), strict=True):
        own = [call.module for call in calls[start.first : last]]
        needed = {id(tensor) for part in own for tensor in (*part.parameters(), *part.buffers())} | start.used
        names = {name for name, tensor in tensors.items() if id(tensor) in needed or id(tensor) not in in_calls}
        yield CallRange(
            " + ".join(call.name for call in calls[start.first : last]), start.first, start.arriving, frozenset(names)
        )


def _lasts(starts: list[_Start], calls: list[ModuleCall]) -> list[int]:
    return [start.first for start in starts[1:]] + [len(calls)]


def _names(starts: list[_Start], calls: list[ModuleCall]) -> str:
    lasts = _lasts(starts, calls)
    groups = [calls[start.first : last] for start, last in zip(starts, lasts, strict=True)]
    return (
        ", ".join(" + ".join(call.name or "the module itself" for call in group) for group in groups)
        or "it calls no module"
    )


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run something and leave the module's buffers and torch's random numbers as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
