"""Names of parameters, from the modules that a script calls."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class ParameterNames:
    """Knows a parameter's name by the outermost module that holds it; further modules' classes are put in front.

    ``roots`` are these modules.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # an id is a parameter's only as long as it lives

    def add(self, root: nn.Module) -> None:
        """Learn the names of a module's parameters."""
        if any(known is root for known in self.roots):
            return
        self.roots.append(root)
        prefix = "" if len(self.roots) == 1 else f"{type(root).__name__}."
        for name, parameter in root.named_parameters():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = prefix + name
                self._kept.append(parameter)

    def of(self, optimizer: Optimizer, parameters: list[Tensor]) -> list[str]:
        """Return the names of an optimizer's parameters; one that no module holds is called by its place."""
        made: list[str] = []
        for place, parameter in enumerate(parameters):
            name = self._names.get(id(parameter), f"{type(optimizer).__name__} parameter {place}")
            made.append(name if name not in made else f"{name} ({place})")
        return made

    def knows(self, parameter: Tensor) -> bool:
        """Return whether a module that was called holds a parameter."""
        return id(parameter) in self._names

    def of_one(self, parameter: Tensor) -> str:
        """Return the name of a parameter, its shape where no module that was called holds it."""
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
