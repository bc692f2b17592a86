"""The names of modules and parameters in a model, looked up without going through all of it each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class ModulePaths:
    """Names by id, of the model asked about last. The model is searched again for a module that is not known."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: dict[int, tuple[nn.Module, str]] = {}

    def of_module(self, model: nn.Module, module: nn.Module) -> str:
        """Return the name of a module in a model, "" for the model itself and for modules outside of it."""
        if self._model is not model or id(module) not in self._modules:
            self._go_through(model)
        return self._modules.get(id(module), (module, ""))[1]

    def of_parameters(self, model: nn.Module, near: nn.Module, parameters: Sequence[Any]) -> list[str]:
        """Return the names of those parameters that are in a model, after a first look at the module ``near``.

        Under FSDP, modules hold different parameters from one layer to the next.
        """
        path = self.of_module(model, near)
        known = {id(one): name for name, one in near.named_parameters(path)}
        if not {*map(id, parameters)} <= known.keys():
            known = {id(one): name for name, one in model.named_parameters()}
        return [known[id(one)] for one in parameters if id(one) in known]

    def _go_through(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {id(one): (one, name) for name, one in model.named_modules()}
