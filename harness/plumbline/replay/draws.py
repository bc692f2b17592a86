"""Draws a replay's random numbers in the dtype in which the model draws them, whatever the replay computes in.

A generator gives other numbers for another dtype. A float64 replay that drew in float64 would have other dropout masks
than the training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from plumbline.replay.compiled_draws import CompiledDraws, kept
from plumbline.replay.precision import ReplayPrecision

_IN_PLACE = frozenset({"uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_LIKE = frozenset({"rand_like", "randn_like"})
_FROM_VALUES = frozenset(
    {"normal", "bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
)
_MADE = frozenset({"rand", "randn", "normal"})
_DROPOUT = "native_dropout"

DRAWING = _IN_PLACE | _LIKE | _FROM_VALUES | _MADE | {_DROPOUT}
"""Names of operators that draw random numbers whose values depend on a dtype."""


class UnknownDrawError(Exception):
    """The dtype of a draw is unknown. A replay in the model's own precision must find it first."""


class Draws:
    """The dtypes in which a forward and its backward pass draw random numbers, in order.

    ``dtypes`` is None if they are not known; draws then use ``usual``, if that is known. ``default`` is the default
    dtype of the training. ``compiled`` draws in place of the operators if the training runs compiled code.
    """

    def __init__(
        self,
        precision: ReplayPrecision,
        dtypes: Iterable[torch.dtype] | None,
        usual: torch.dtype | None,
        default: torch.dtype,
        compiled: CompiledDraws | None = None,
    ) -> None:
        self._compiled = compiled
        self._precision = precision
        self._dtypes = None if dtypes is None else iter(dtypes)
        self._usual = usual
        self._default = default

    def draw(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that draws random numbers, and return its result in the precision of the replay."""
        first = leading(args)
        dtype = self._dtype(kwargs.get("dtype"), is_made=first is None)
        drawn: Any = None if self._compiled is None else self._compiled.draw(name, dtype, args, kwargs)
        if drawn is not None:
            return widened(drawn, self._precision)
        if first is None:
            return widened(func(*args, **{**kwargs, "dtype": dtype}), self._precision)
        if name == _DROPOUT:
            return _dropout(func, dtype, *args)
        if name in _IN_PLACE:
            own = torch.empty_like(first, dtype=dtype)
            return first.copy_(func(own, *(_lowered(one, dtype) for one in args[1:]), **kwargs))
        named = {**kwargs, "dtype": dtype} if name in _LIKE else kwargs
        return widened(func(*(_lowered(one, dtype) for one in args), **named), self._precision)

    def _dtype(self, asked: torch.dtype | None, *, is_made: bool) -> torch.dtype:
        """Return the dtype of the next draw. ``asked`` may be a tensor's dtype, which is wider here than in training.

        ``is_made``: no argument is a tensor with a dtype.
        """
        if self._dtypes is not None:
            dtype = next(self._dtypes, None)
        elif asked is not None:
            dtype = None if self._precision.wide(asked) is asked else asked
        else:
            dtype = self._default if is_made else self._usual
        if dtype is None:
            raise UnknownDrawError
        return dtype


def is_drawn(args: tuple[Any, ...]) -> bool:
    """Return whether an operator in ``DRAWING`` draws floating-point numbers with these arguments."""
    first = leading(args)
    return first is None or first.is_floating_point()


def leading(args: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor among the first two arguments; a draw uses its dtype."""
    return next((one for one in args[:2] if isinstance(one, Tensor)), None)


def dtype_of_draw(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which an operator in ``DRAWING`` draws."""
    first = leading(args)
    asked: torch.dtype | None = kwargs.get("dtype")
    return asked or (torch.get_default_dtype() if first is None else first.dtype)


def widened(result: Any, precision: ReplayPrecision) -> Any:
    """Return a tensor in the precision of a replay, and any other value unchanged."""
    return result.to(precision.wide(result.dtype)) if isinstance(result, Tensor) else result


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _dropout(func: Any, dtype: torch.dtype, x: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    _, mask = func(torch.ones_like(x, dtype=dtype), p, train)
    if train is False:
        return x.clone(), mask
    return kept(x, mask, p), mask
