"""The calls of blocks that a user's step makes: recorded once, and cut short where a stage begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.trainer.balanced.blocks import tensors_in
from harness.trainer.balanced.elsewhere import Elsewhere, arrived, is_missing
from harness.trainer.errors import MisconfigurationError
from harness.trainer.precision_plugins import map_tensors


@dataclass
class ModuleCall:
    """One call of a module in a step, and the calls inside it."""

    module: nn.Module
    name: str
    inner: list[ModuleCall] = field(default_factory=list)


def record_calls(module: nn.Module, step: Callable[[], Any]) -> list[ModuleCall]:
    """Run ``step`` and return the calls of modules that it made itself, in order."""
    open_calls = [ModuleCall(module, "")]

    def enter(name: str) -> Callable[..., None]:
        def note(called: nn.Module, inputs: Any) -> None:
            call = ModuleCall(called, name)
            open_calls[-1].inner.append(call)
            open_calls.append(call)

        return note

    def leave(called: nn.Module, inputs: Any, outputs: Any) -> None:
        open_calls.pop()

    handles = []
    for name, part in module.named_modules():
        handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return open_calls[0].inner


def open_up(calls: Sequence[ModuleCall], largest: float) -> list[ModuleCall]:
    """Replace containers by the calls inside them: each Sequential, and what has more than ``largest`` weights."""
    opened = []
    for call in calls:
        weights = sum(parameter.numel() for parameter in call.module.parameters())
        if call.inner and (isinstance(call.module, nn.Sequential) or weights > largest):
            opened += open_up(call.inner, largest)
        else:
            opened.append(call)
    return opened


def calls_of(calls: Sequence[ModuleCall], blocks: Sequence[nn.Module]) -> list[ModuleCall]:
    """Return the calls of these modules, at any depth."""
    chosen = {id(block) for block in blocks}
    found = []
    for call in calls:
        found += [call] if id(call.module) in chosen else calls_of(call.inner, blocks)
    return found


ADVICE = "Return modules from configure_blocks that every step calls."


class StageOver(BaseException):
    """Ends the user's step on a stage that is not the last; ``departing`` are the inputs of the next stage."""

    def __init__(self, departing: list[Tensor]) -> None:
        super().__init__()
        self.departing = departing


@dataclass(frozen=True)
class Part:
    """The calls ``first`` to ``last - 1`` of a step, and which of the tensors that a call takes travel to it.

    ``arriving`` numbers those among the tensors in the arguments of call ``first``, None: all that are elsewhere;
    ``departing`` those of call ``last``, None: all of them.
    """

    first: int
    last: int
    arriving: tuple[int, ...] | None = ()
    departing: tuple[int, ...] | None = ()


class Interception:
    """Runs parts of a step: calls before the part are skipped, and the step ends at the first call after it."""

    def __init__(self, calls: Sequence[tuple[str, nn.Module]], device: torch.device, *, remember: bool) -> None:
        """Take the name and module of each call of a step; ``remember`` the shapes of skipped calls' outputs."""
        self.calls = list(calls)
        self.device = device
        self.remembered: dict[Any, Any] | None = {} if remember else None
        self.part = Part(0, len(self.calls))
        self.inputs: Sequence[Tensor] = ()
        self.used_inputs: tuple[int, ...] = ()
        self.next_call = 0
        self.active = False
        self.skipping = False

    @contextmanager
    def installed(self) -> Iterator[Interception]:
        """Stand in for the forward of each block, for as long as the context lasts."""
        modules = {id(module): module for _, module in self.calls}.values()
        previous = [(module, module.__dict__.get("forward")) for module in modules]
        for module in modules:
            module.forward = self._standing_in(module, module.forward)
        try:
            yield self
        finally:
            for module, own in previous:
                if own is None:
                    del module.forward
                else:
                    module.forward = own

    def run(self, part: Part, inputs: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run a part of ``step``, with ``inputs`` as what arrives; return what departs, or else the step's outputs.

        Raises:
            MisconfigurationError: The step does not call the blocks in the order known, or needs what is elsewhere.

        """
        self.part, self.inputs, self.next_call, self.active = part, inputs, 0, True
        try:
            outputs = step()
        except StageOver as over:
            return over.departing
        finally:
            self.active = False
        if part.last < len(self.calls) or self.next_call <= part.first:
            raise MisconfigurationError(
                f"The step ended without a call of {self.calls[self.next_call][0]}, which it made when the blocks "
                f"were found: balanced needs the same calls for every batch, in training and validation. {ADVICE}"
            )
        return map_tensors(arrived, outputs)

    def _standing_in(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return forward(*args, **kwargs)
            number = self._count(module)
            if number < self.part.first:
                return self._skip(number, forward, args, kwargs)
            if number == self.part.first and number:
                self._take_in(tensors_in((args, kwargs)))
            if number == self.part.last:
                raise StageOver(self._departing(tensors_in((args, kwargs))))
            self.active = False  # a block that is called inside another one is part of it
            try:
                return forward(*map_tensors(arrived, args), **map_tensors(arrived, kwargs))
            finally:
                self.active = True

        return stand_in

    def _count(self, module: nn.Module) -> int:
        """Return the number of this call; calls that a batch leaves out are passed over, but not where stages meet."""
        left_out = range(self.next_call, len(self.calls))
        number = next((number for number in left_out if self.calls[number][1] is module), None)
        if number is None or any(meets in range(self.next_call, number) for meets in (self.part.first, self.part.last)):
            called = next(name for name, one in self.calls if one is module)
            expected = self.calls[self.next_call][0] if left_out else "no other block"
            raise MisconfigurationError(
                f"The step calls {called} where {expected} was called when the blocks were found: balanced needs the "
                f"same calls for every batch, in training and validation. {ADVICE}"
            )
        self.next_call = number + 1
        return number

    def _skip(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the call would, without values."""

        def elsewhere(tensor: Tensor) -> Tensor:
            return Elsewhere.like(tensor, self.device)

        key = (number, *((tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs))))
        if self.remembered is not None and key in self.remembered:
            return map_tensors(elsewhere, self.remembered[key])
        self.active, self.skipping = False, True
        try:
            outputs = forward(*map_tensors(elsewhere, args), **map_tensors(elsewhere, kwargs))
        finally:
            self.active, self.skipping = True, False
        if self.remembered is not None:
            self.remembered[key] = outputs
        return map_tensors(elsewhere, outputs)

    def _take_in(self, tensors: list[Tensor]) -> None:
        """Give the tensors in the first call's arguments the values that arrived."""
        numbers = self.part.arriving
        if numbers is None:
            different = {id(tensor): number for number, tensor in enumerate(tensors) if is_missing(tensor)}
            numbers = tuple(sorted(different.values()))
            self.used_inputs = numbers
            values = [self.inputs[number] for number in numbers]
        else:
            values = list(self.inputs)
        for number, value in zip(numbers, values, strict=True):
            tensor = tensors[number]
            if not isinstance(tensor, Elsewhere):
                raise MisconfigurationError(
                    f"An input of {self.calls[self.part.first][0]} no longer comes from the block before it: balanced "
                    "needs the same data flow for every batch."
                )
            tensor.value = value

    def _departing(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.part.departing is None:
            return [arrived(tensor) for tensor in tensors]
        leaving = [arrived(tensors[number]) for number in self.part.departing]
        if any(isinstance(tensor, Elsewhere) for tensor in leaving):
            raise MisconfigurationError(
                f"{self.calls[self.part.last][0]} needs what another stage than the one before it has computed: "
                "balanced needs the same data flow for every batch."
            )
        return leaving
