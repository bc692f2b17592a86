"""Sends the calls of custom autograd functions through another one, also those of an ``apply`` that a script keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Applied = Callable[[Callable[..., Any], Any, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""Runs a function: it gets what runs it, the class, and the arguments, and returns its result."""


_FOLLOWING: list[Applied] = []

_FUNCTION: Any = torch.autograd.Function
_IS_LOOKED_UP = isinstance(vars(_FUNCTION)["apply"], classmethod)
"""Before torch 2.14, ``Function.apply`` is a function of Python that looks up its base class's at each call. So a patch
of that one reaches an ``apply`` that a script has kept, too. Since then it is a builtin."""
_PATCHED: Any = torch.autograd.function._SingleLevelFunction if _IS_LOOKED_UP else _FUNCTION
_APPLY: Any = vars(torch._C._FunctionBase)["apply"]


def follow_functions(applied: Applied) -> Callable[[], None]:
    """Send the calls of all functions through ``applied`` until what is returned is called.

    Several may follow, and end in any order; the last one is asked first.
    """

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        run = _APPLY.__get__(None, kind)
        for one in tuple(_FOLLOWING):
            run = _through(one, run, kind)
        return run(*args, **kwargs)

    if not _FOLLOWING:
        _PATCHED.apply = classmethod(apply)
    _FOLLOWING.append(applied)

    def end() -> None:
        if applied in _FOLLOWING:
            _FOLLOWING.remove(applied)
            if not _FOLLOWING:
                _restore()

    return end


def _restore() -> None:
    if _IS_LOOKED_UP:
        del _PATCHED.apply
    else:
        _PATCHED.apply = _APPLY


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
