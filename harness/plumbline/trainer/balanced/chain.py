"""Runs a step of a user's module to find its blocks: where the step can be cut, and which tensors each block needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plumbline.trainer.balanced.blocks import (
    Block,
    ModuleCall,
    calls_of,
    held_tensors,
    open_up,
    record_calls,
    undisturbed,
)
from plumbline.trainer.balanced.data_flow import Carried, DataFlow, Label, Part
from plumbline.trainer.balanced.flow_recorder import record_data_flow
from plumbline.trainer.balanced.interception import Interception
from plumbline.trainer.balanced.remote_tensor import NoValuesError, RemoteTensor
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.nested import tensors_in

Step = Callable[[], Any]


@dataclass(frozen=True)
class CallRange:
    """A block: consecutive module calls with the code after them.

    It has the places (see ``Position``) from ``first`` to before the next block's ``first``. ``arriving`` are the
    tensors that earlier blocks compute and this or a later block uses. ``holds`` names the parameters and buffers that
    the block uses.
    """

    name: str
    first: int
    arriving: tuple[Carried, ...]
    holds: frozenset[str]


@dataclass(frozen=True)
class Chain:
    """The blocks of a step. ``calls`` names the modules that the step calls; ``drawn`` is as in ``DataFlow``."""

    calls: tuple[str, ...]
    blocks: tuple[CallRange, ...]
    drawn: frozenset[Label] = frozenset()

    def part(self, first: int, last: int) -> Part:
        """Return the part of a step that consists of blocks ``first`` to ``last - 1``."""
        begin = self.blocks[first]
        if last == len(self.blocks):
            return Part(begin.first, 2 * len(self.calls), begin.arriving, ())
        return Part(begin.first, self.blocks[last].first, begin.arriving, self.blocks[last].arriving)

    def holds(self, first: int, last: int) -> frozenset[str]:
        return frozenset().union(*(block.holds for block in self.blocks[first:last]))

    def runnable(self, interception: Interception, step: Callable[[Any], Any]) -> list[Block]:

        def run(number: int, value: Any, inputs: Any) -> Any:
            arrived = [] if number == 0 else value
            return interception.run(self.part(number, number + 1), arrived, lambda: step(inputs))

        return [
            Block(block.name, partial(run, number), tuple(sorted(block.holds)))
            for number, block in enumerate(self.blocks)
        ]

    def interception(self, module: nn.Module, device: torch.device) -> Interception:
        modules = dict(module.named_modules())
        return Interception([(name, modules[name]) for name in self.calls], device, self.drawn)


def find_chain(
    module: nn.Module,
    step: Step,
    devices: int,
    device: torch.device,
    declared: Sequence[nn.Module] | None = None,
    least: int | None = None,
    validation: Step | None = None,
) -> Chain:
    """Run ``step``, and ``validation`` if given, and return their common blocks.

    Blocks are module calls: those of the modules ``declared`` or, if None, the step's direct calls, with Sequentials
    and modules that have more than a device's share of the weights replaced by their inner calls. Calls between which
    the step cannot be cut are merged, see ``flow_recorder.py``. At least ``least`` blocks are required, by default one
    per device. The module and the random states do not change.
    """
    tried = partial(_undisturbed, module, device)
    calls = tried(record_calls, module, step)
    if declared is not None:
        calls = calls_of(calls, declared)
    else:
        calls = open_up(calls, sum(parameter.numel() for parameter in module.parameters()) / devices)
    flow = tried(record_data_flow, module, calls, step) if calls else DataFlow(())
    tried(find_obstacles, flow, _trial(calls, flow, device), step)
    if validation is not None and calls:
        evaluated = tried(record_data_flow, module, calls, validation, all_calls=False)
        tried(find_obstacles, evaluated, _trial(calls, evaluated, device), validation)
        flow.agree_with(evaluated)
    flow.keep_changed_together()
    first: dict[int, int] = {}
    for number, call in enumerate(calls):
        if next(call.module.buffers(), None) is not None:
            begin = first.setdefault(id(call.module), number)
            flow.forbid(2 * begin, 2 * number, f"{call.name} has buffers and is called more than once")
    starts = flow.cuts() if calls else []
    if len(starts) < (devices if least is None else least):
        reasons = "; ".join(flow.reasons())
        blocks = f"{len(starts)} block{'' if len(starts) == 1 else 's'} ({_names(starts, calls)})"
        raise MisconfigurationError(
            f"{type(module).__name__} can be cut into {blocks}, too few for {devices} devices"
            f"{f': {reasons}' if reasons else ''}. Use fewer gpus, or return from configure_blocks "
            "modules that every step calls one after the other."
        )
    return Chain(tuple(flow.calls), tuple(_blocks(module, starts, calls, flow)), frozenset(flow.drawn))


def _undisturbed(module: nn.Module, device: torch.device, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with undisturbed(module, device), torch.no_grad():
        return run(*args, **kwargs)


def _trial(calls: Sequence[ModuleCall], flow: DataFlow, device: torch.device) -> Interception:
    return Interception([(call.name, call.module) for call in calls], device, frozenset(flow.drawn), trial=True)


def _blocks(module: nn.Module, starts: list[int], calls: list[ModuleCall], flow: DataFlow) -> Iterator[CallRange]:
    tensors = held_tensors(module)
    placed = {id(tensor) for call in calls for tensor in held_tensors(call.module).values()}
    placed |= {id(tensors[name]) for name in flow.changes}
    for first, last in pairwise((*starts, flow.end)):
        own = _calls_at(calls, first, last)
        needed = {id(tensor) for call in own for tensor in held_tensors(call.module).values()}
        names = {name for name, tensor in tensors.items() if id(tensor) in needed or id(tensor) not in placed}
        names = names.union(*flow.weights[first:last])
        yield CallRange(" + ".join(call.name for call in own), first, flow.live(first), frozenset(names))


def _calls_at(calls: list[ModuleCall], first: int, last: int) -> list[ModuleCall]:
    return calls[(first + 1) // 2 : (last + 1) // 2]


def _names(starts: list[int], calls: list[ModuleCall]) -> str:
    groups = [_calls_at(calls, first, last) for first, last in pairwise((*starts, 2 * len(calls)))]
    return (
        ", ".join(" + ".join(call.name or "the module itself" for call in group) for group in groups)
        or "it calls no module"
    )


def find_obstacles(flow: DataFlow, interception: Interception, step: Step) -> None:
    with interception.installed():
        try:
            with HiddenTensorUse(flow, interception) as hidden:
                outputs = interception.run(Part(flow.end, flow.end), [], step)
            hidden.use(tensors_in(outputs))
        except Exception as error:
            position = interception.position
            why = f"cannot run on tensors without values: {type(error).__name__}: {error}"
            if isinstance(error.__cause__, NoValuesError):
                why = str(error.__cause__)
            reason = f"{flow.after(position.call)} {why}"
            flow.forbid(position.place, flow.end, reason)


class HiddenTensorUse(TorchFunctionMode):
    """Records where a step uses a tensor that a block computes but does not return, as one kept in an attribute."""

    def __init__(self, flow: DataFlow, interception: Interception) -> None:
        super().__init__()
        self.flow, self.interception = flow, interception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation. Tensors made within a skipped call are marked as hidden in it, unless it returns them."""
        self.use(tensors_in((args, kwargs or {})))
        outputs = func(*args, **(kwargs or {}))
        if self.interception.skipping:
            for tensor in tensors_in(outputs):
                if isinstance(tensor, RemoteTensor) and tensor.hidden_in is None:
                    tensor.hidden_in = self.interception.position.call
        return outputs

    def use(self, given: list[Tensor]) -> None:
        """Forbid cuts between the call that hides a tensor and the current position, which uses it."""
        position = self.interception.position
        for tensor in given:
            hidden_in = tensor.hidden_in if isinstance(tensor, RemoteTensor) else None
            if hidden_in is not None and not (self.interception.skipping and hidden_in == position.call):
                reason = f"{self.flow.calls[hidden_in]} makes a tensor that is used later but not returned"
                self.flow.forbid(2 * hidden_in, position.place, reason)
