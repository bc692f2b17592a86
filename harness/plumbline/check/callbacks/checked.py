"""Checks a training function on every call, whatever launches it: Ray Train, Accelerate or a spawn."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from plumbline.check.callbacks.told_verdict import ToldVerdict

P = ParamSpec("P")
R = TypeVar("R")


class Checked(Generic[P, R]):
    """A function whose calls are checked. On rank 0, ``verdict`` is the verdict on the last call in this process."""

    def __init__(self, train: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, train)
        self._train, self._options = train, options
        self._told = ToldVerdict(**options)

    @property
    def verdict(self) -> Any:
        return self._told.verdict

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._told = ToldVerdict(**self._options)
        with self._told:
            return self._train(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle by name if this object has replaced its function, as a decorator does, so that it can be spawned."""
        module, name = self._train.__module__, self._train.__qualname__
        if _named(module, name) is self:
            return _named, (module, name)
        return Checked, (self._train, self._options)


@overload
def checked(train: Callable[P, R], /) -> Checked[P, R]: ...


@overload
def checked(**options: Any) -> Callable[[Callable[P, R]], Checked[P, R]]: ...


def checked(train: Any = None, /, **options: Any) -> Any:
    """Return a training function that records its first steps. At its end, rank 0 judges them and prints the verdict.

    Use it as a decorator, with or without options, or call it where the function is passed on::

        TorchTrainer(plumbline.checked(train), …).fit()
        accelerate.notebook_launcher(plumbline.checked(steps=8)(train), num_processes=2)

    ``options`` are the arguments of ``ToldVerdict``: ``steps``, ``after``, ``objective``, ``folder`` and
    ``stop_when_wrong``. With ``stop_when_wrong``, a call whose training is wrong raises ``WrongTrainingError`` on rank
    0.
    """
    return functools.partial(Checked, options=options) if train is None else Checked(train, options)


def _named(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):  # defined inside a function
        return None
