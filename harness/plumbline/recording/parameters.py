"""The parameters of an optimizer: their order, which numbers them, their names, and when parameters are added."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer

from plumbline.recording.flat_sharding import WRAPPED, flat_units
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


class ParameterNames:
    """Names parameters by the first of ``roots`` that holds them.

    Names in any root but the first begin with the name of the root's class, and with a number from its second root on.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self.roots: list[nn.Module] = []
        self._named: dict[int, tuple[str, Tensor]] = {}  # by id, which is unique as long as the tensor is kept
        for root in roots:
            self.add(root)

    def add(self, root: nn.Module) -> None:
        if any(known is root for known in self.roots):
            return
        self.roots.append(root)
        flat_units(root)
        self._name_those_of(root)

    def refresh(self) -> None:
        """Name parameters that were added to the modules later, such as adapters."""
        for root in self.roots:
            self._name_those_of(root)

    def trainable(self) -> list[tuple[str, Tensor]]:
        return [(name, one) for name, one in self._named.values() if one.requires_grad]

    def knows(self, parameter: Tensor) -> bool:
        return id(parameter) in self._named

    def known(self, parameters: Sequence[Tensor]) -> list[str | None]:
        """Return the names of parameters, None for one that no module holds.

        If no module holds any of them, they may be master weights: other tensors with the shapes of all parameters of
        the modules, in the same order. Then they get the names of those parameters.
        """
        own = list(self._named.values())
        if not any(map(self.knows, parameters)) and [p.shape for p in parameters] == [p.shape for _, p in own]:
            return [name for name, _ in own]
        return [self._name(parameter) for parameter in parameters]

    def of(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters; one that no module holds is named by its position."""
        made: list[str] = []
        for index, parameter in enumerate(parameters_of(optimizer)):
            name = self._name(parameter) or f"{type(optimizer).__name__} parameter {index}"
            made.append(name if name not in made else f"{name} ({index})")
        return made

    def of_one(self, parameter: Tensor) -> str:
        """Return the name of a parameter, or its shape if no module holds it."""
        return self._name(parameter) or f"a parameter of shape {tuple(parameter.shape)}"

    def _name_those_of(self, root: nn.Module) -> None:
        prefix = "" if root is self.roots[0] else f"{self._name_of_root(root)}."
        for name, parameter in root.named_parameters():
            self._named.setdefault(id(parameter), (prefix + name.replace(WRAPPED, ""), parameter))

    def _name_of_root(self, root: nn.Module) -> str:
        name = type(root).__name__
        alike = [one for one in self.roots[1:] if type(one).__name__ == name]
        number = next(index for index, one in enumerate(alike, 1) if one is root)
        return name if number == 1 else f"{name} {number}"

    def _name(self, parameter: Tensor) -> str | None:
        return self._named[id(parameter)][0] if self.knows(parameter) else None
