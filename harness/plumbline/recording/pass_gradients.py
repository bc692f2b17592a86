"""Which gradients a backward pass changes. Other models' stay as they were, with what a script did to them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from plumbline.recording.sharding import local


class PassGradients:
    """The gradients' tensors and their versions when a backward pass began."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._before = {}
        for one in parameters:
            if one.grad is not None:
                own = local(one.grad)
                self._before[id(one)] = (ref(own), own._version)

    def is_changed(self, parameter: Tensor) -> bool:
        """Return whether the parameter has another gradient now, or has written to the one that it had."""
        if parameter.grad is None:
            return id(parameter) in self._before
        own = local(parameter.grad)
        known = self._before.get(id(parameter))
        return known is None or known[0]() is not own or known[1] != own._version
