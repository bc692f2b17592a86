"""The dispatch modes under which calls are replayed: what every operator of a replay goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.check.rank.draws import Draws, doubled, draws, leading
from harness.check.rank.precision import double_of

_MADE_FROM_PYTHON = frozenset({"lift_fresh", "lift_fresh_copy", "lift"})


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts generators that the script passes to operators back to their states when the replay is over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: list[tuple[torch.Generator, Tensor]] = []

    def __exit__(self, *error: Any) -> None:
        """End the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for generator, state in self._generators:
            generator.set_state(state)
        self._generators.clear()

    def _keep_generator(self, kwargs: dict[str, Any]) -> None:
        generator = kwargs.get("generator")
        if generator is not None and all(one is not generator for one, _ in self._generators):
            self._generators.append((generator, generator.get_state()))


class NativeMode(ReplayMode):  # type: ignore[no-untyped-call]
    """Changes nothing, and notes the dtypes in which random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        self._keep_generator(kwargs)
        first = leading(args)
        if first is not None and draws(_name(func), args, kwargs):
            self.drawn.append(first.dtype)
        return func(*args, **kwargs)


class Float64Mode(ReplayMode):  # type: ignore[no-untyped-call]
    """Lets everything that the model's code casts to a lower precision become float64."""

    def __init__(self, random: Draws) -> None:
        super().__init__()
        self._random = random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        name = _name(func)
        self._keep_generator(kwargs)
        if draws(name, args, kwargs):
            return self._random.draw(func, name, args, kwargs)
        args, kwargs = _with_double_dtypes(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            # a tensor that is no parameter, buffer or argument, such as a plain attribute of another object
            if not any(double_of(one.dtype) is not one.dtype for one in _tensors((args, kwargs))):
                raise
            return func(*_doubled(args), **_doubled(kwargs))
        return doubled(result) if name in _MADE_FROM_PYTHON else result


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _with_double_dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if any(isinstance(one, torch.dtype) for one in args):
        args = tuple(double_of(one) if isinstance(one, torch.dtype) else one for one in args)
    if isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs = {**kwargs, "dtype": double_of(kwargs["dtype"])}
    return args, kwargs


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _doubled(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_doubled(part) for part in value)
    if isinstance(value, dict):
        return {name: _doubled(part) for name, part in value.items()}
    return doubled(value)
