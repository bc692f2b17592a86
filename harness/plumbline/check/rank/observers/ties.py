"""Notes parameters that were tied when the model was built, or are meant to be, but are separate when it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames, parameters_of
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.sharding import local


@dataclass(frozen=True, eq=False)
class _Place:
    module: ref[nn.Module]
    name: str

    @property
    def parameter(self) -> Any:
        module = self.module()
        return None if module is None else module._parameters.get(self.name)

    def is_at(self, module: nn.Module, name: str) -> bool:
        return self.module() is module and self.name == name


class TieObserver(Observer):
    """Follows the assignment of parameters to modules: a parameter that is assigned twice is tied.

    Assigning another parameter to one of the places unties them on purpose, except in ``load_state_dict``. Facts of the
    process: ``lost``, pairs of names of tied parameters that train apart; ``declared``, such pairs that the model's
    configuration ties. A parameter that a model once tied still counts as tied if only one of its places, or a copy of
    it, is left: pipeline stages are cut out of whole models.
    """

    name = "ties"

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._first: dict[int, tuple[ref[Tensor], _Place]] = {}
        self._ties: list[tuple[_Place, _Place]] = []
        self._tied: dict[int, ref[Tensor]] = {}
        self._loading = 0
        self._looked = False
        self._facts: Facts = {}

    def install(self) -> None:
        wrap(nn.Module, "register_parameter", self._around_register)
        wrap(nn.Module, "load_state_dict", self._around_load)
        wrap(nn.Parameter, "__deepcopy__", self._around_copy)
        wrap(torch.utils, "swap_tensors", self._around_swap)

    def is_tied(self, parameter: Tensor) -> bool:
        """Return whether a model held a parameter, or the one that it is a copy of, in several places.

        Megatron marks those that several pipeline stages hold.
        """
        known = self._tied.get(id(parameter))
        return (known is not None and known() is parameter) or getattr(parameter, "shared_embedding", False) is True

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at the ties before the first recorded step."""
        if self._looked or not self._names.roots:
            return
        self._looked = True
        stepped = set(map(id, parameters_of(optimizer)))
        for root in self._names.roots:
            names = {id(one): name for name, one in root.named_parameters(remove_duplicate=False)}
            for kind, pairs in (("lost", self._pairs()), ("declared", _declared(root))):
                apart = [
                    [names[id(one)], names[id(other)]]
                    for one, other in pairs
                    if {id(one), id(other)} <= names.keys()
                    and stepped & {id(one), id(other)}
                    and _train_apart(one, other)
                ]
                self._facts.setdefault(kind, []).extend(apart)

    def final_facts(self) -> Facts | None:
        return self._facts if any(self._facts.values()) else None

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        for first, second in self._ties:
            yield first.parameter, second.parameter

    def _around_register(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        if not torch.compiler.is_compiling() and not self._loading:
            attempt(self._assigned, module, *args, **kwargs)
        return result

    def _around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loading += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._loading -= 1

    def _around_copy(self, original: Callable[..., Any], parameter: Any, memo: Any) -> Any:
        result = original(parameter, memo)
        if self.is_tied(parameter):
            self._tie(result)
        return result

    def _around_swap(self, original: Callable[..., Any], *tensors: Any) -> Any:
        # torch refuses to swap tensors with weak references. Each stays the same object, with other contents.
        places = [self._first.pop(id(one), (None, None))[1] for one in tensors]
        tied = [self._tied.pop(id(one), None) is not None for one in tensors]
        try:
            return original(*tensors)
        finally:
            for one, place, was_tied in zip(tensors, places, tied, strict=True):
                if place is not None:
                    self._follow(one, place)
                if was_tied:
                    self._tie(one)

    def _follow(self, parameter: Tensor, place: _Place) -> None:
        key = id(parameter)
        self._first[key] = ref(parameter, lambda _: self._first.pop(key, None)), place

    def _tie(self, parameter: Tensor) -> None:
        key = id(parameter)
        self._tied[key] = ref(parameter, lambda _: self._tied.pop(key, None))

    def _assigned(self, module: nn.Module, name: str, param: Tensor | None) -> None:
        for tie in [tie for tie in self._ties if any(place.is_at(module, name) for place in tie)]:
            self._ties.remove(tie)
            for place in tie:
                self._tied.pop(id(place.parameter), None)
        if param is None:
            return
        place, key = _Place(ref(module), name), id(param)
        known, first = self._first.get(key, (None, None))
        if known is None or known() is not param:
            self._follow(param, place)
        elif first is not None and not first.is_at(module, name) and first.parameter is param:
            self._ties.append((first, place))
            self._tie(param)


def _declared(root: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the weights of a model's embeddings if its configuration ties them, as in transformers."""
    for module in root.modules():
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            ends = [getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
            if all(map(callable, ends)):
                yield tuple(getattr(end(), "weight", None) for end in ends if end is not None)  # type: ignore[misc]


def _train_apart(one: Any, other: Any) -> bool:
    if not (isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter)) or one is other:
        return False
    if not (one.requires_grad and other.requires_grad) or one.shape != other.shape:
        return False
    return local(one).untyped_storage().data_ptr() != local(other).untyped_storage().data_ptr()
