"""A tensor whose values are on another stage: it has a shape and a dtype, and gets its values when they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.trainer.balanced.blocks import tensors_in
from harness.trainer.precision_plugins import map_tensors

DEVICE = torch.Tensor.device.__get__


class Elsewhere(Tensor):
    """Stands for the output of a block of another stage, and for all that is computed from it.

    Without a ``value`` its operations run on the meta device and return tensors of this class: shapes and dtypes are
    known, values are not. With a ``value`` they run on it. So the code of the user around the blocks runs unchanged on
    every stage, and a loss that needs what is not there is known as such.
    """

    meta: Tensor
    value: Tensor | None
    at: torch.device

    @classmethod
    def like(cls, tensor: Tensor, at: torch.device) -> Elsewhere:
        """Return one with the shape and dtype of ``tensor``; user code is told that it is on the device ``at``."""
        meta = tensor.meta if isinstance(tensor, Elsewhere) else tensor.detach().to("meta")
        made = meta.as_subclass(Elsewhere)
        made.meta, made.value, made.at = meta, None, at
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the values if all have arrived, else on the meta device."""
        args, named = map_tensors(arrived, args), map_tensors(arrived, dict(kwargs or {}))
        missing = [tensor for tensor in tensors_in((args, named)) if isinstance(tensor, Elsewhere)]
        if not missing:
            return func(*args, **named)
        at = missing[0].at
        if func == DEVICE:
            return at
        with torch.no_grad():
            outputs = func(*map_tensors(_shape_only, args), **map_tensors(_shape_only, _without_device(named)))
        return map_tensors(lambda tensor: cls.like(tensor, at), outputs)


def arrived(tensor: Tensor) -> Tensor:
    """Return the value of a tensor that stood for another, if it has one by now; other tensors as they are."""
    return tensor.value if isinstance(tensor, Elsewhere) and tensor.value is not None else tensor


def is_missing(tensor: Tensor) -> bool:
    """Return whether the tensor's values are on another stage."""
    return isinstance(arrived(tensor), Elsewhere)


def _shape_only(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, Elsewhere) else tensor.detach().to("meta")


def _without_device(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "device"}
