"""Routes the calls of custom autograd functions through a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Applied = Callable[[Callable[..., Any], Any, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""A wrapper: it gets the original ``apply``, the function's class and the arguments, and returns the result."""


_FOLLOWING: list[Applied] = []

_FUNCTION: Any = torch.autograd.Function
_IS_LOOKED_UP = isinstance(vars(_FUNCTION)["apply"], classmethod)
"""Before torch 2.14, ``Function.apply`` is a Python function that looks up its base class's ``apply`` at each call, so
a patch of the base class also reaches an ``apply`` that a script has stored. Since then it is a builtin."""
_PATCHED: Any = torch.autograd.function._SingleLevelFunction if _IS_LOOKED_UP else _FUNCTION
_APPLY: Any = vars(torch._C._FunctionBase)["apply"]


def follow_functions(applied: Applied) -> Callable[[], None]:
    """Route the calls of all functions through ``applied``; return a function that ends this.

    Several wrappers may be active, and end in any order; the last one is the outermost.
    """
    if not _FOLLOWING:
        _PATCHED.apply = classmethod(_apply)
    _FOLLOWING.append(applied)

    def end() -> None:
        if applied in _FOLLOWING:
            _FOLLOWING.remove(applied)
            if not _FOLLOWING:
                _restore()

    return end


def keep_functions_patched() -> None:
    """Patch until the process ends, so that an ``apply`` that a script stores from now on can be followed later."""
    if not _IS_LOOKED_UP:
        follow_functions(lambda run, kind, args, kwargs: run(*args, **kwargs))


def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    run = _APPLY.__get__(None, kind)
    for one in tuple(_FOLLOWING):
        run = _through(one, run, kind)
    return run(*args, **kwargs)


_apply.__name__ = "apply"  # TorchDynamo recognizes it by this name


def _restore() -> None:
    if _IS_LOOKED_UP:
        del _PATCHED.apply
    else:
        _PATCHED.apply = _APPLY


def _through(applied: Applied, run: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: applied(run, kind, args, kwargs)


@contextmanager
def functions_applied(applied: Applied) -> Iterator[None]:
    """Route the calls of all functions through ``applied`` inside the block."""
    end = follow_functions(applied)
    try:
        yield
    finally:
        end()
