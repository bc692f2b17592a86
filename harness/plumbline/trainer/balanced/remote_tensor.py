"""Tensors whose values are on another stage, and module calls with such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plumbline.trainer.balanced.blocks import private_buffers
from plumbline.trainer.nested import map_tensors, tensors_in

DEVICE = torch.Tensor.device.__get__
MOVES = (Tensor.cpu, Tensor.cuda)


class NoValuesError(RuntimeError):
    """An operation needs the values of a tensor, but these are on another stage."""


class RemoteTensor(Tensor):
    """Represents an output of another stage's block, or a tensor computed from it.

    Its operations run on the meta device and return tensors of this class, so that the user's code between blocks runs
    unchanged on every stage. ``hidden_in`` is the number of the call that made it without returning it, otherwise None.
    """

    meta: Tensor
    at: torch.device
    hidden_in: int | None

    @classmethod
    def like(cls, tensor: Tensor, at: torch.device) -> RemoteTensor:
        """Return a remote tensor with the shape and dtype of ``tensor``. For user code, its device is ``at``."""
        hidden_in = tensor.hidden_in if isinstance(tensor, RemoteTensor) else None
        meta = tensor.meta if isinstance(tensor, RemoteTensor) else tensor.detach().to("meta")
        made = Tensor._make_subclass(RemoteTensor, meta)  # as_subclass fails in torch 2.4 under a dispatch mode
        made.meta, made.at, made.hidden_in = meta, at, hidden_in
        return made

    def become(self, value: Tensor) -> None:
        """Become ``value`` wherever this tensor is referenced. ``value`` must not be used afterwards."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, value)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the meta device. Tensors that it changes in place and returns stay the same objects."""
        given = [tensor for tensor in tensors_in((args, kwargs or {})) if isinstance(tensor, RemoteTensor)]
        at = given[0].at
        if func == DEVICE:
            return at
        if func in MOVES:
            return given[0]
        same = {id(tensor.meta): tensor for tensor in given}
        try:
            with torch.no_grad():
                outputs = func(
                    *map_tensors(_shape_only, _on_meta(func, args)), **map_tensors(_shape_only, _named(kwargs))
                )
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise  # the operation would also fail with values
            raise NoValuesError(takes_values_by(func)) from error
        return map_tensors(lambda tensor: same[id(tensor)] if id(tensor) in same else cls.like(tensor, at), outputs)


def is_remote(tensor: Tensor) -> bool:
    return isinstance(tensor, RemoteTensor)


def takes_values(func: Any, args: Any, kwargs: Any, outputs: Any) -> bool:
    """Return whether ``outputs`` are not tensors and depend on values, not only on shapes and dtypes."""
    return outputs is not None and not tensors_in(outputs) and not runs_without_values(func, args, kwargs)


def takes_values_by(func: Any) -> str:
    return f"reads values of a tensor ({getattr(func, '__name__', 'a function')})"


def runs_without_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation needs only the shapes and dtypes of its tensors."""
    try:
        with torch.no_grad():
            func(*map_tensors(_shape_only, args), **map_tensors(_shape_only, kwargs))
    except Exception:
        return False
    return True


def _shape_only(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, RemoteTensor) else tensor.detach().to("meta")


def _on_meta(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    named = (torch.device, str) if func is Tensor.to else torch.device
    return tuple(torch.device("meta") if isinstance(value, named) else value for value in args)


def _named(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (kwargs or {}).items() if name != "device"}


def run_without_values(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, trial: bool) -> Any:
    """Return the outputs of ``forward`` for tensors without values. The buffers of ``module`` do not change."""
    if not trial:
        with private_buffers(module):
            return forward(*args, **kwargs)
    with private_buffers(module), ValuesTaken() as taken, attributes_set() as changed:
        outputs = forward(*args, **kwargs)
    returns = returns_others(outputs)
    if taken.by is not None and (returns or changed):
        how = "returns values that are not tensors" if returns else f"sets {min(changed)}"
        raise NoValuesError(f"{takes_values_by(taken.by)} and {how}")
    if returns and any(changed.values()):
        raise NoValuesError(f"changes {min(changed)} and returns values that are not tensors")
    return outputs


class ValuesTaken(TorchFunctionMode):
    """Records as ``by`` the first operation whose results, or the shapes of whose results, depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.by: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.by is None and not runs_without_values(func, args, kwargs or {}):
            self.by = func
        return func(*args, **(kwargs or {}))


@contextmanager
def attributes_set() -> Iterator[dict[str, bool]]:
    """Yield a dict of the module attributes that are set to numbers or strings: names, and whether values changed."""
    changed: dict[str, bool] = {}
    set_attribute = nn.Module.__setattr__

    def noting(part: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, (bool, int, float, str)):
            changed[name] = changed.get(name, False) or getattr(part, name, None) != value
        set_attribute(part, name, value)

    nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield changed
    finally:
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]


def returns_others(outputs: Any) -> bool:
    """Return whether nested dicts, lists and tuples contain anything but tensors and None."""
    if isinstance(outputs, dict):
        return any(map(returns_others, outputs.values()))
    if isinstance(outputs, (list, tuple)):
        return any(map(returns_others, outputs))
    return outputs is not None and not isinstance(outputs, Tensor)
