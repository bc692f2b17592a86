"""The parameters of an optimizer: their order, which numbers them, and when an optimizer is given some."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer

from plumbline.recording.patching import wrap


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order of its groups, which numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_container(optimizer: Optimizer) -> bool:
    """Return whether an optimizer only holds others, in a list, that update all of its parameters."""
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)) and value and all(isinstance(one, Optimizer) for one in value):
            inner = {id(parameter) for one in value for parameter in parameters_of(one)}
            if inner == {*map(id, parameters_of(optimizer))}:
                return True
    return False


class RegisteredParameters:
    """Notes which parameters modules are given from now on, for good: adapters, layers that replace others."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}
        register_module_parameter_registration_hook(self._note)

    def __contains__(self, parameter: Tensor) -> bool:
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter

    def _note(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._known[id(parameter)] = weakref.ref(parameter)


def follow_added_parameters(added: Callable[[Optimizer], None]) -> None:
    """Call ``added`` with each optimizer that is made, and again with one that is given further groups, for good."""

    def around(add: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        add(optimizer, *args, **kwargs)
        added(optimizer)

    wrap(Optimizer, "add_param_group", around)
