"""Which tensors a step computes between its blocks, where it uses them, and between which calls it cannot be cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from harness.trainer.balanced.blocks import bytes_of, held_tensors, tensors_in
from harness.trainer.balanced.calls import ModuleCall, replaced_forwards
from harness.trainer.balanced.elsewhere import Elsewhere, runs_without_values
from harness.trainer.balanced.interception import Interception
from harness.trainer.balanced.labels import Carried, Label, Part, Position
from harness.trainer.errors import MisconfigurationError

Step = Callable[[], Any]


@dataclass
class Journey:
    """A tensor that a step computes from what blocks return: ``last_use`` is the last place where it is used."""

    last_use: int
    differentiable: bool
    bytes: int


@dataclass
class DataFlow:
    """The tensors of a step between calls, by label, and why it cannot be cut before a place, by its number.

    ``weights`` has for each place the ids of parameters and buffers that are used there; ``drawn`` labels what
    operations between calls draw at random. ``labels.Position`` tells what places are.
    """

    calls: Sequence[str]
    journeys: dict[Label, Journey] = field(default_factory=dict)
    weights: list[set[int]] = field(default_factory=list)
    drawn: set[Label] = field(default_factory=set)
    obstacles: dict[int, str] = field(default_factory=dict)

    def live(self, cut: int) -> tuple[Carried, ...]:
        """Return the tensors that cross the cut before place ``cut``: computed before it, and used later."""
        crossing = [label for label, one in self.journeys.items() if label.place < cut <= one.last_use and cut]
        return tuple(Carried(label, self.journeys[label].differentiable) for label in sorted(crossing))

    @property
    def end(self) -> int:
        """The number of places."""
        return 2 * len(self.calls)

    def cuts(self) -> list[int]:
        """Return the places where blocks begin: between two calls where fewest bytes cross, if the step can be cut."""
        possible = [[cut for cut in between if cut not in self.obstacles] for between in self._between_calls()]
        return [0, *(min(cuts, key=self._crossing_bytes) for cuts in possible if cuts)]

    def reasons(self) -> list[str]:
        """Return why there are no cuts between some calls."""
        missing = [cuts[0] for cuts in self._between_calls() if self.obstacles.keys() >= set(cuts)]
        return list(dict.fromkeys(self.obstacles[cut] for cut in missing))

    def _between_calls(self) -> list[tuple[int, int]]:
        """Return the places before which two calls can be parted: the second one, and the code after the first one."""
        return [(2 * call, 2 * call - 1) for call in range(1, len(self.calls))]

    def _crossing_bytes(self, cut: int) -> int:
        return sum(self.journeys[carried.label].bytes for carried in self.live(cut))

    def forbid(self, first: int, last: int, reason: str) -> None:
        """Note that the step cannot be cut after place ``first``, up to before place ``last``."""
        for cut in range(max(first + 1, 1), min(last + 1, self.end)):
            self.obstacles.setdefault(cut, reason)

    def after(self, call: int) -> str:
        """Return what a message calls a call together with the code that follows it."""
        return f"{self.calls[call] or 'the module itself'} or the code after it" if call >= 0 else "the step's begin"


def find_data_flow(module: nn.Module, calls: Sequence[ModuleCall], step: Step, device: torch.device) -> DataFlow:
    """Run ``step``, once with values and once without, and return how its tensors go from call to call."""
    flow = DataFlow([call.name for call in calls], weights=[set() for _ in range(2 * len(calls))])
    recorder = Recorder(flow, module, calls)
    with replaced_forwards([call.module for call in calls], recorder.standing_in), recorder:
        outputs = step()
    recorder.leave(outputs)
    interception = Interception(
        [(call.name, call.module) for call in calls], device, frozenset(flow.drawn), remember=False
    )
    nothing = Part(flow.end, flow.end)
    with interception.installed():
        try:
            with HiddenFlow(flow, interception) as hidden:
                outputs = interception.run(nothing, [], step)
            hidden.use(tensors_in(outputs))
        except Exception as error:
            position = interception.position
            reason = f"{flow.after(position.call)} does not run without values: {type(error).__name__}: {error}"
            flow.forbid(position.place, flow.end, reason)
    return flow


@dataclass(frozen=True)
class Change:
    """The tensor of an id was changed in place at a place."""

    tensor: int
    place: int


class Recorder(TorchFunctionMode):
    """Notes each operation of a step, within blocks and between them.

    Tensors that depend on a block's output, or are drawn, have labels: one stage computes them. Others, as those that
    are computed from the batch alone, are computed by each stage.
    """

    def __init__(self, flow: DataFlow, module: nn.Module, calls: Sequence[ModuleCall]) -> None:
        super().__init__()
        self.flow, self.calls = flow, calls
        self.held = {id(tensor): name for name, tensor in held_tensors(module).items()}
        self.first_use: dict[int, int] = {}
        self.position = Position()
        self.labels: Any = WeakTensorKeyDictionary()
        self.from_weights: Any = WeakTensorKeyDictionary()
        self.made_at: Any = WeakTensorKeyDictionary()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.changes: dict[int, list[Change]] = {}
        self.since: dict[int, int] = {}
        self.spoiled: dict[int, int] = {}

    def standing_in(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that notes the call, unless another block makes it."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self.position.inside:
                return forward(*args, **kwargs)
            number = self.position.call + 1
            if number == len(self.calls) or self.calls[number].module is not module:
                raise MisconfigurationError(
                    "The step calls other modules when it runs once more: balanced needs the same calls each time."
                )
            self.position.enter(number)
            with torch._C.DisableTorchFunction():
                given = tensors_in((args, kwargs))
                before = versions(given)
                self._use(given)
            outputs = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self._note_changes(given, before, returning=True)
                trains = next(module.parameters(), None) is not None
                self._label(tensors_in(outputs), trains or any(map(self._differentiable, given)))
            self.position.leave()
            return outputs

        return stand_in

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note what it uses, makes and changes."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        before, random_before = versions(given), [] if self.position.inside else random_state()
        outputs = func(*args, **kwargs)
        made = tensors_in(outputs)
        needs_values = bool(made) or outputs is None or not runs_without_values(func, args, kwargs)
        if needs_values:
            self._use(given)
        if self.position.inside:
            self._note_changes(given, before)
            return outputs
        self.position.pass_operation(func)
        labelled = any(tensor in self.labels for tensor in given)
        drawn = not labelled and not all(map(torch.equal, random_before, random_state()))
        if needs_values and not made and outputs is not None and labelled:
            name = getattr(func, "__name__", "a function")
            reason = f"{self.flow.after(self.position.call)} takes values out of a tensor ({name})"
            self.flow.forbid(self.position.place, self.flow.end, reason)
        differentiable = any(map(self._differentiable, given))
        if labelled or drawn:
            self._note_changes(given, before)
            self._label(made, differentiable)
            self.flow.drawn.update(self.labels[tensor] for tensor in made if drawn)
        else:
            spoiled = [self.spoiled[key] for key in map(self._memory, given) if key in self.spoiled]
            changed = [tensor for tensor, version in zip(given, before, strict=True) if version != version_of(tensor)]
            for tensor in (*made, *changed):
                if spoiled:
                    self.spoiled[self._memory(tensor)] = min(spoiled)
                if differentiable:
                    self.from_weights[tensor] = True
        return outputs

    def leave(self, outputs: Any) -> None:
        """Note that the step returns ``outputs``."""
        self._use(tensors_in(outputs))

    def _differentiable(self, tensor: Tensor) -> bool:
        label = self.labels.get(tensor)
        if label is not None:
            return self.flow.journeys[label].differentiable
        return isinstance(tensor, nn.Parameter) or tensor in self.from_weights or self._memory(tensor) in self.spoiled

    def _label(self, made: list[Tensor], differentiable: bool) -> None:
        for number, tensor in enumerate(made):
            label = self.labels[tensor] = self.position.label(number)
            self.made_at.setdefault(tensor, label.place)
            self.since.setdefault(self._memory(tensor), label.place)
            floating = tensor.is_floating_point() or tensor.is_complex()
            self.flow.journeys[label] = Journey(label.place, differentiable and floating, bytes_of(tensor))

    def _use(self, given: list[Tensor]) -> None:
        place = max(self.position.place, 0)
        here_only = self.position.inside or any(tensor in self.labels for tensor in given)
        for tensor in given:
            label = self.labels.get(tensor)
            if label is not None:
                self.flow.journeys[label].last_use = place
            if id(tensor) in self.held:
                self.first_use.setdefault(id(tensor), place)
                for weights in self.flow.weights[place : place + 1 if here_only else None]:
                    weights.add(id(tensor))
            self._use_changed(tensor, label)

    def _use_changed(self, tensor: Tensor, label: Label | None) -> None:
        """Forbid cuts that would part the tensor from one that shares its memory and was changed in place."""
        key = self._memory(tensor)
        if key in self.spoiled:
            place = self.spoiled[key]
            reason = f"{self.flow.after(place // 2)} changes a tensor in place that no block has computed"
            self.flow.forbid(place, self.position.place, reason)
        for change in self.changes.get(key, ()):
            if change.tensor != id(tensor):
                first = self.since[key] if label is None else self.made_at[tensor]
                last = self.position.place if label is None else change.place
                reason = (
                    f"{self.flow.after(change.place // 2)} changes a tensor in place that is used again by another name"
                )
                self.flow.forbid(first, last, reason)

    def _note_changes(self, given: list[Tensor], before: list[int], *, returning: bool = False) -> None:
        place, differentiable = self.position.place, any(map(self._differentiable, given))
        for tensor, version in zip(given, before, strict=True):
            if version == version_of(tensor):
                continue
            memory = self._memory(tensor)
            if tensor in self.labels:
                self.changes.setdefault(memory, []).append(Change(id(tensor), place))
                sharing = [one for one in self.labels if differentiable and self._memory(one) == memory]
                for label in map(self.labels.__getitem__, sharing):
                    self.flow.journeys[label].differentiable = tensor.is_floating_point() or tensor.is_complex()
            elif self.position.inside and not returning:
                pass  # nothing but what a block has made itself: its arguments are compared when it returns
            elif id(tensor) in self.held:
                reason = f"{self.flow.after(self.position.call)} changes {self.held[id(tensor)]} in place"
                self.flow.forbid(self.first_use.get(id(tensor), 0), self.flow.end, reason)
            else:
                self.spoiled.setdefault(memory, place)

    def _memory(self, tensor: Tensor) -> int:
        """Return what is equal for tensors that share memory."""
        if tensor.is_sparse:
            return -1
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        known = self.storages.get(key)
        if known is None or known() is None:  # another tensor had it before
            self.storages[key] = weakref.ref(storage)
            for known_of in (self.changes, self.since, self.spoiled):
                known_of.pop(key, None)
        return key


class HiddenFlow(TorchFunctionMode):
    """Notes where a step, run without values, uses what a block has kept to itself, in an attribute for example."""

    def __init__(self, flow: DataFlow, interception: Interception) -> None:
        super().__init__()
        self.flow, self.interception = flow, interception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; what is made while a call is skipped is hidden in it, unless the call returns it."""
        self.use(tensors_in((args, kwargs or {})))
        outputs = func(*args, **(kwargs or {}))
        if self.interception.skipping:
            for tensor in tensors_in(outputs):
                if isinstance(tensor, Elsewhere) and tensor.hidden_in is None:
                    tensor.hidden_in = self.interception.position.call
        return outputs

    def use(self, given: list[Tensor]) -> None:
        """Forbid the cuts between where tensors are hidden and where they are used."""
        position = self.interception.position
        for tensor in given:
            hidden_in = tensor.hidden_in if isinstance(tensor, Elsewhere) else None
            if hidden_in is not None and not (self.interception.skipping and hidden_in == position.call):
                reason = f"{self.flow.calls[hidden_in]} makes a tensor that is used later and that it does not return"
                self.flow.forbid(2 * hidden_in, position.place, reason)


def versions(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [version_of(tensor) for tensor in tensors]


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor, or one with its memory, was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def random_state() -> list[Tensor]:
    """Return the state of the generators of cpu and current device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states
