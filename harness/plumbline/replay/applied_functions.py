"""Sends the calls of custom autograd functions through another one, also those of an ``apply`` that a script keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Applied = Callable[[Callable[..., Any], Any, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""Runs a function: it gets what runs it, the class, and the arguments, and returns its result."""


_FOLLOWING: list[Applied] = []


def follow_functions(applied: Applied) -> Callable[[], None]:
    """Send the calls of all functions through ``applied`` until what is returned is called.

    Several may follow, and end in any order; the last one is asked first. ``Function.apply`` looks its base class's up
    at each call, but is looked up itself when a script keeps it.
    """
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(base, kind).apply
        for one in tuple(_FOLLOWING):
            run = _through(one, run, kind)
        return run(*args, **kwargs)

    if not _FOLLOWING:
        base.apply = classmethod(apply)
    _FOLLOWING.append(applied)

    def end() -> None:
        if applied in _FOLLOWING:
            _FOLLOWING.remove(applied)
            if not _FOLLOWING:
                del base.apply

    return end


def _through(applied: Applied, run: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: applied(run, kind, args, kwargs)


@contextmanager
def functions_applied(applied: Applied) -> Iterator[None]:
    """Send the calls of all functions through ``applied`` inside the block."""
    end = follow_functions(applied)
    try:
        yield
    finally:
        end()
