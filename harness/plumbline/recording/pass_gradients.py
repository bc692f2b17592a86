"""Which gradients a backward pass changes. Other models' stay as they were, with what a script did to them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from plumbline.recording.sharding import local


class PassGradients:
    """The gradients' tensors and their versions when a backward pass began."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._before = {id(one): (ref(one.grad), _versions(one.grad)) for one in parameters if one.grad is not None}

    def is_changed(self, parameter: Tensor) -> bool:
        """Return whether the parameter has another gradient now, or has written to the one that it had."""
        gradient, known = parameter.grad, self._before.get(id(parameter))
        if gradient is None or known is None:
            return (gradient is None) != (known is None)
        tensor, versions = known
        return tensor() is not gradient or versions != _versions(gradient)


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Return a gradient's version, and that of a DTensor's shard.

    Autograd adds to a DTensor without counting it as a change of the shard, and FSDP adds to the shard alone.
    """
    return gradient._version, local(gradient)._version
