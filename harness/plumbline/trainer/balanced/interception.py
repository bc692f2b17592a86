"""Runs a part of a user's step: skips the calls of earlier blocks, and ends the step before the first later block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from plumbline.trainer.balanced.blocks import replaced_forwards
from plumbline.trainer.balanced.data_flow import Carried, Label, Part, Position
from plumbline.trainer.balanced.remote_tensor import NoValuesError, RemoteTensor, run_without_values
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.nested import map_tensors, tensors_in

ADVICE = "Return modules from configure_blocks that every step calls."


class StageOver(BaseException):
    """Ends the user's step on a stage that is not the last. ``departing`` are the tensors for the next stage."""

    def __init__(self, departing: list[Tensor]) -> None:
        super().__init__()
        self.departing = departing


@dataclass(frozen=True)
class Skipped:
    """The outputs of a call without values. ``given`` maps ids of outputs that are arguments to argument numbers."""

    outputs: Any
    given: dict[int, int]


class Interception:
    """Runs parts of a step that calls these modules, given with their names, in order.

    Outputs of skipped calls report ``device`` as their device. ``drawn`` has the labels of tensors that operations
    between calls draw at random, on one stage only. In a ``trial``, the outputs of skipped calls are not cached, and
    skipped calls that return or store numbers that depend on values raise ``NoValuesError``.
    """

    def __init__(
        self,
        calls: Sequence[tuple[str, nn.Module]],
        device: torch.device,
        drawn: frozenset[Label] = frozenset(),
        *,
        trial: bool = False,
    ) -> None:
        self.calls, self.device, self.drawn = list(calls), device, drawn
        self.remembered: dict[Any, Skipped] | None = None if trial else {}
        self.part = Part(0, 2 * len(self.calls))
        self.inputs: Sequence[Tensor] = ()
        self.wanted: set[Label] = set()
        self.tensors: dict[Label, Tensor] = {}
        self.position, self.next_call = Position(), 0
        self.active = False
        self.skipping = False
        self._between = OperationsBetween(self)

    @contextmanager
    def installed(self) -> Iterator[Interception]:
        with replaced_forwards([module for _, module in self.calls], self._standing_in):
            yield self

    def run(self, part: Part, inputs: Sequence[Tensor], step: Callable[[], Any]) -> Any:
        """Run a part of ``step`` on the arriving tensors ``inputs``. Return departing tensors or the step's outputs.

        ``inputs`` must not be used afterwards.
        """
        self.part, self.inputs, self.tensors = part, inputs, {}
        self.wanted = {carried.label for carried in (*part.arriving, *part.departing)}
        self.position, self.next_call, self.active = Position(), 0, True
        numbered = bool(part.first and self.drawn) or any(label.operation for label in self.wanted)
        try:
            with self._between if numbered else nullcontext():
                outputs = step()
        except StageOver as over:
            return over.departing
        except NoValuesError as error:
            raise MisconfigurationError(
                f"{self._named(self.position.call)}, or the code after it, {error}. This stage does not have the "
                "values, because another stage computes them: balanced needs the same data flow for every batch, in "
                "training and validation. Use tensor operations instead, such as torch.where, or the same code in each "
                "step."
            ) from error
        finally:
            self.active, self.inputs, self.tensors = False, (), {}
        end = 2 * len(self.calls)
        if part.first < end and (part.last < end or 2 * self.next_call <= part.first):
            raise MisconfigurationError(
                f"The step ended without a call of {self.calls[self.next_call][0]}, which it made when the blocks "
                f"were found: balanced needs the same calls for every batch, in training and validation. {ADVICE}"
            )
        return outputs

    def note_operation(self, func: Any, outputs: Any) -> Any:
        """Record an operation between calls. Replace outputs that another stage draws at random by remote tensors."""
        self.position.pass_operation(func)
        if self.position.place < self.part.first > 0 and self.position.label(0) in self.drawn:
            outputs = map_tensors(lambda tensor: RemoteTensor.like(tensor, self.device), outputs)
        self._note(outputs)
        return outputs

    def _note(self, outputs: Any) -> None:
        for number, tensor in enumerate(tensors_in(outputs)):
            label = self.position.label(number)
            if label in self.wanted:
                self.tensors[label] = tensor

    def _standing_in(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return forward(*args, **kwargs)
            number = self._count(module)
            with self._aside():  # a block that is called within another block is part of that block
                self.position.enter(number)
                self._begin_or_end()
                if self.position.place < self.part.first:
                    outputs = self._skip(number, forward, args, kwargs)
                else:
                    outputs = forward(*args, **kwargs)
                self._note(outputs)
                self.position.leave()
                self._begin_or_end()
            return outputs

        return stand_in

    def _begin_or_end(self) -> None:
        if self.position.place == self.part.first:
            self._take_in()
        if self.position.place == self.part.last:
            raise StageOver(self._departing())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        numbering = _get_current_function_mode() is self._between  # type: ignore[no-untyped-call]
        self.active = False
        if numbering:  # the mode slows down each operation
            self._between.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if numbering:
                self._between.__enter__()  # type: ignore[no-untyped-call]
            self.active = True

    def _count(self, module: nn.Module) -> int:
        """Return the number of this call. A batch can leave out calls, but not those at the bounds of this stage."""
        left_out = range(self.next_call, len(self.calls))
        number = next((number for number in left_out if self.calls[number][1] is module), None)
        meets = {place // 2 for place in (self.part.first, self.part.last)}
        if number is None or meets.intersection(range(self.next_call, number)):
            called = next(name for name, one in self.calls if one is module)
            expected = self.calls[self.next_call][0] if left_out else "no other block"
            raise MisconfigurationError(
                f"The step calls {called} where {expected} was called when the blocks were found: balanced needs the "
                f"same calls for every batch, in training and validation. {ADVICE}"
            )
        self.next_call = number + 1
        return number

    def _skip(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        shapes = [(tensor.shape, tensor.dtype) for tensor in given]
        key = (number, self.calls[number][1].training, *shapes, *plain_values_in((args, kwargs)))
        skipped = None if self.remembered is None else self.remembered.get(key)
        if skipped is None:
            copies = {id(tensor): RemoteTensor.like(tensor, self.device) for tensor in given}
            self.skipping = True
            try:
                args, kwargs = map_tensors(lambda tensor: copies[id(tensor)], (args, kwargs))
                outputs = run_without_values(
                    self.calls[number][1], forward, args, kwargs, trial=self.remembered is None
                )
            finally:
                self.skipping = False
            numbers = {id(copies[id(tensor)]): index for index, tensor in enumerate(given)}
            found = {id(tensor): numbers[id(tensor)] for tensor in tensors_in(outputs) if id(tensor) in numbers}
            skipped = Skipped(outputs, found)
            if self.remembered is not None:
                self.remembered[key] = skipped

        def remote(tensor: Tensor) -> Tensor:
            place = skipped.given.get(id(tensor))
            same = None if place is None else given[place]
            if isinstance(same, RemoteTensor):
                return same
            made = RemoteTensor.like(tensor, self.device)
            made.hidden_in = None
            return made

        return map_tensors(remote, skipped.outputs)

    def _take_in(self) -> None:
        for carried, value in zip(self.part.arriving, self.inputs, strict=True):
            tensor = self.tensors.get(carried.label)
            if not isinstance(tensor, RemoteTensor):
                raise MisconfigurationError(self._changed(carried))
            tensor.become(value)
        departing = {carried.label for carried in self.part.departing}
        self.tensors = {label: tensor for label, tensor in self.tensors.items() if label in departing}

    def _departing(self) -> list[Tensor]:
        for carried in self.part.departing:
            if isinstance(self.tensors.get(carried.label), (RemoteTensor, type(None))):
                raise MisconfigurationError(self._changed(carried))
        return [self.tensors[carried.label] for carried in self.part.departing]

    def _changed(self, carried: Carried) -> str:
        return (
            f"{self._named(carried.label.call)}, or the code after it, does not compute the tensors of later blocks "
            "as it did when the blocks were found: balanced needs the same data flow for every batch, in training and "
            f"validation. {ADVICE}"
        )

    def _named(self, call: int) -> str:
        return self.calls[call][0] if call >= 0 else "the start of the step"


class OperationsBetween(TorchFunctionMode):
    """Numbers the operations of a step between calls of blocks."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self.interception = interception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        return self.interception.note_operation(func, outputs) if self.interception.active else outputs


def plain_values_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in (key, *plain_values_in(item))]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in plain_values_in(item)]
    return [value] if value is None or isinstance(value, (bool, int, float, str)) else []
