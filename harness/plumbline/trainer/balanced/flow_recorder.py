"""Runs a step and records each operation to find the step's data flow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from plumbline.devices.calls import random_state as device_random_state
from plumbline.devices.calls import started_types
from plumbline.trainer.balanced.blocks import ModuleCall, bytes_of, held_tensors, registered_buffers, replaced_forwards
from plumbline.trainer.balanced.data_flow import CarriedTensor, DataFlow, Label, Position
from plumbline.trainer.balanced.interception import ADVICE
from plumbline.trainer.balanced.remote_tensor import takes_values, takes_values_by
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.nested import tensors_in


def record_data_flow(
    module: nn.Module, calls: Sequence[ModuleCall], step: Callable[[], Any], *, all_calls: bool = True
) -> DataFlow:
    """Run ``step`` and return its data flow between ``calls``. With ``all_calls``, it must not skip calls."""
    flow = DataFlow([call.name for call in calls], weights=[set() for _ in range(2 * len(calls))])
    recorder = FlowRecorder(flow, module, calls, all_calls=all_calls)
    with replaced_forwards([call.module for call in calls], recorder.standing_in), recorder:
        outputs = step()
    recorder.leave(outputs)
    return flow


@dataclass(frozen=True)
class Change:
    """An in-place change, at a place, of the tensor with this ``id()``."""

    tensor: int
    place: int


class FlowRecorder(TorchFunctionMode):
    """Records each operation of a step, within and between blocks.

    Tensors that depend on a block's output, or are drawn at random, have labels: a single stage computes them. Every
    stage computes all other tensors, such as those that depend on the batch alone.
    """

    def __init__(self, flow: DataFlow, module: nn.Module, calls: Sequence[ModuleCall], *, all_calls: bool) -> None:
        super().__init__()
        self.flow, self.calls, self.all_calls = flow, calls, all_calls
        self.held = {id(tensor): name for name, tensor in held_tensors(module).items()}
        self.buffers = registered_buffers(module)
        self.kept: list[Tensor] = []
        self.position = Position()
        self.labels: Any = WeakTensorKeyDictionary()
        self.from_weights: Any = WeakTensorKeyDictionary()
        self.made_at: Any = WeakTensorKeyDictionary()
        self.storages: dict[int, weakref.ref[Any]] = {}
        # By storage: in-place changes of labelled tensors, the place where the storage was first labelled, and the
        # place where a block, or an operation on its outputs, changed a tensor without a label.
        self.changes: dict[int, list[Change]] = {}
        self.since: dict[int, int] = {}
        self.spoiled: dict[int, int] = {}

    def standing_in(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that records the call, unless another block makes the call."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self.position.inside:
                return forward(*args, **kwargs)
            number = self._count(module)
            with torch._C.DisableTorchFunction():
                self._note_assigned()
                self.position.enter(number)
                self.flow.called.add(number)
                given = tensors_in((args, kwargs))
                before = versions(given)
                self._use(given)
                buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if id(buffer) in self.held]
            outputs = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self._note_changes(given, before, returning=True)
                self._note_assigned()
                for buffer, previous in buffers:  # batch_norm and others change buffers without a new version
                    if buffer.layout is torch.strided and not torch.equal(buffer, previous):
                        self._note_change(self.held[id(buffer)])
                trains = next(module.parameters(), None) is not None
                self._label(tensors_in(outputs), trains or any(map(self._differentiable, given)))
            self.position.leave()
            return outputs

        return stand_in

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        before, random_before = versions(given), [] if self.position.inside else random_state()
        outputs = func(*args, **kwargs)
        made = tensors_in(outputs)
        takes = takes_values(func, args, kwargs, outputs)
        if takes or made or outputs is None:
            self._use(given)
        if self.position.inside:
            self._note_changes(given, before)
            return outputs
        self.position.pass_operation(func)
        labelled = any(tensor in self.labels for tensor in given)
        drawn = not labelled and not all(map(torch.equal, random_before, random_state()))
        if takes and labelled:
            reason = f"{self.flow.after(self.position.call)} {takes_values_by(func)}"
            self.flow.forbid(self.position.place, self.flow.end, reason)
        differentiable = any(map(self._differentiable, given))
        if labelled or drawn:
            self._note_changes(given, before)
            self._label(made, differentiable)
            self.flow.drawn.update(self.labels[tensor] for tensor in made if drawn)
        else:
            spoiled = [self.spoiled[key] for key in map(self._memory, given) if key in self.spoiled]
            changed = [tensor for tensor, version in zip(given, before, strict=True) if version != version_of(tensor)]
            for tensor in changed:
                if id(tensor) in self.held:
                    self._note_change(self.held[id(tensor)], everywhere=True)
            for tensor in (*made, *changed):
                if spoiled:
                    self.spoiled[self._memory(tensor)] = min(spoiled)
                if differentiable:
                    self.from_weights[tensor] = True
        return outputs

    def leave(self, outputs: Any) -> None:
        self._note_assigned()
        self._use(tensors_in(outputs))

    def _count(self, module: nn.Module) -> int:
        following = range(self.position.call + 1, len(self.calls))
        number = next((number for number in following if self.calls[number].module is module), None)
        if number is None or (self.all_calls and number != following[0]):
            raise MisconfigurationError(
                "The step calls other modules when it runs once more, or in validation: balanced needs the same calls "
                f"each time. {ADVICE}"
            )
        return number

    def _differentiable(self, tensor: Tensor) -> bool:
        label = self.labels.get(tensor)
        if label is not None:
            return self.flow.tensors[label].differentiable
        return isinstance(tensor, nn.Parameter) or tensor in self.from_weights or self._memory(tensor) in self.spoiled

    def _label(self, made: list[Tensor], differentiable: bool) -> None:
        for number, tensor in enumerate(made):
            label = self.labels[tensor] = self.position.label(number)
            self.made_at.setdefault(tensor, label.place)
            self.since.setdefault(self._memory(tensor), label.place)
            floating = tensor.is_floating_point() or tensor.is_complex()
            self.flow.tensors[label] = CarriedTensor(label.place, differentiable and floating, bytes_of(tensor))

    def _use(self, given: list[Tensor]) -> None:
        place = max(self.position.place, 0)
        here_only = self.position.inside or any(tensor in self.labels for tensor in given)
        for tensor in given:
            label = self.labels.get(tensor)
            if label is not None:
                self.flow.tensors[label].last_use = place
            if id(tensor) in self.held:
                self.flow.use(self.held[id(tensor)], here_only=here_only, place=place)
            self._use_changed(tensor, label)

    def _use_changed(self, tensor: Tensor, label: Label | None) -> None:
        """Forbid cuts between the tensor's use and in-place changes of tensors that share its memory."""
        key = self._memory(tensor)
        if key in self.spoiled:
            place = self.spoiled[key]
            reason = f"{self.flow.after(place // 2)} modifies in place a tensor that no block computes"
            self.flow.forbid(place, self.position.place, reason)
        for change in self.changes.get(key, ()):
            if change.tensor != id(tensor):
                first = self.since[key] if label is None else self.made_at[tensor]
                last = self.position.place if label is None else change.place
                changing = self.flow.after(change.place // 2)
                reason = f"{changing} modifies in place a tensor that is used later through another view"
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
                    self.flow.tensors[label].differentiable = tensor.is_floating_point() or tensor.is_complex()
            elif id(tensor) in self.held:
                self._note_change(self.held[id(tensor)])
            elif self.position.inside and not returning:
                pass  # a tensor that the block has made itself, or an argument, which is compared when it returns
            else:
                self.spoiled.setdefault(memory, place)

    def _note_change(self, name: str, *, everywhere: bool = False) -> None:
        """Record a change of a parameter or buffer. ``everywhere``: all stages that run this code make the change."""
        place = self.position.place
        if everywhere:
            until: int | None = place
        else:
            until = None if self.position.inside else self.flow.end
        self.flow.use(name, here_only=not everywhere, place=max(place, 0))
        self.flow.changes.setdefault(name, []).append((place, until))

    def _note_assigned(self) -> None:
        for slot, (buffers, key, previous) in enumerate(self.buffers):
            tensor = buffers.get(key)
            if tensor is not None and tensor is not previous:
                name = self.held[id(tensor)] = self.held[id(previous)]
                self.buffers[slot] = (buffers, key, tensor)
                self.kept.append(previous)  # so that no other tensor gets its id
                self._note_change(name, everywhere=not self.position.inside and tensor not in self.labels)

    def _memory(self, tensor: Tensor) -> int:
        if tensor.is_sparse:
            return -1
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        known = self.storages.get(key)
        if known is None or known() is None:  # a new storage, perhaps with the key of one that has been freed
            self.storages[key] = weakref.ref(storage)
            for known_of in (self.changes, self.since, self.spoiled):
                known_of.pop(key, None)
        return key


def versions(tensors: list[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of the tensor's memory, 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def random_state() -> list[Tensor]:
    on_devices = [device_random_state(torch.device(name)) for name in started_types()]
    return [torch.get_rng_state(), *(state for state in on_devices if state is not None)]
