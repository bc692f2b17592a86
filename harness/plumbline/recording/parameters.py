"""The parameters of an optimizer: their order, which numbers them, and when parameters are added."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer

from plumbline.recording.patching import undone_by, wrap


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order of its groups, which numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_container(optimizer: Optimizer) -> bool:
    """Return whether an optimizer only contains a list of others that update all of its parameters."""
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)) and value and all(isinstance(one, Optimizer) for one in value):
            inner = {id(parameter) for one in value for parameter in parameters_of(one)}
            if inner == {*map(id, parameters_of(optimizer))}:
                return True
    return False


class RegisteredParameters:
    """Notes the result of ``now`` whenever a parameter is registered in a module: a new one, or a replacement."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        undone_by(register_module_parameter_registration_hook(self._note).remove)

    def when(self, parameter: Tensor) -> int:
        """Return what was noted for a parameter, 0 if nothing was."""
        known, when = self._known.get(id(parameter), (None, 0))
        return when if known is not None and known() is parameter else 0

    def _note(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._known[id(parameter)] = weakref.ref(parameter), self._now()


def follow_added_parameters(added: Callable[[Optimizer], None]) -> None:
    """Call ``added`` with each optimizer when it is created, and when it gets another parameter group."""

    def around(add: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        add(optimizer, *args, **kwargs)
        added(optimizer)

    wrap(Optimizer, "add_param_group", around)
