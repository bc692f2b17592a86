"""Sends the calls of custom autograd functions through another one, also those of an ``apply`` that a script keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Applied = Callable[[Callable[..., Any], Any, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""Runs a function: it gets what runs it, the class, and the arguments, and returns its result."""


def follow_functions(applied: Applied) -> Callable[[], None]:
    """Send the calls of all functions through ``applied`` until what is returned is called.

    ``Function.apply`` looks its base class's up at each call, but is looked up itself when a script keeps it.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    before = base.__dict__.get("apply")

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(super(base, kind).apply, kind, args, kwargs)

    base.apply = own = classmethod(apply)

    def end() -> None:
        if base.__dict__.get("apply") is not own:
            return
        if before is None:
            del base.apply
        else:
            base.apply = before

    return end


@contextmanager
def functions_applied(applied: Applied) -> Iterator[None]:
    """Send the calls of all functions through ``applied`` inside the block."""
    end = follow_functions(applied)
    try:
        yield
    finally:
        end()
