"""Runs a call of another stage's block on tensors without values: its outputs have shapes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plumbline.trainer.balanced.remote_tensor import NoValuesError, runs_without_values, takes_values_by
from plumbline.trainer.balanced.undisturbed import private_buffers


def run_without_values(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, *, trial: bool) -> Any:
    """Return the outputs of ``forward`` for tensors without values; the buffers of ``module`` stay as they are.

    Raises:
        NoValuesError: In a ``trial``, if the outputs or an attribute of the module seem to contain numbers that depend
            on weights, buffers or the number of calls. Other stages would have other numbers.

    """
    if not trial:
        with private_buffers(module):
            return forward(*args, **kwargs)
    with private_buffers(module), ValuesTaken() as taken, attributes_set() as changed:
        outputs = forward(*args, **kwargs)
    returns = returns_others(outputs)
    if taken.by is not None and (returns or changed):
        how = "returns more than tensors" if returns else f"sets {min(changed)}"
        raise NoValuesError(f"{takes_values_by(taken.by)} and {how}")
    if returns and any(changed.values()):
        raise NoValuesError(f"changes {min(changed)} and returns more than tensors")
    return outputs


class ValuesTaken(TorchFunctionMode):
    """Records the first operation, ``by``, whose results or their shapes depend on values."""

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
    """Record the attributes of modules that are set to numbers or strings, and whether their values changed."""
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
