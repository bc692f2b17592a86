"""Work without recomputing activation checkpoints: replays that save every tensor, and readers of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint

_readers = 0
"""How many ``nothing_recomputed`` blocks are open."""


class NotSavedError(AttributeError):
    """A node has no saved tensor, because a checkpoint would have to run its forward again for it."""


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Raise ``NotSavedError`` if code that only looks at the graph reads a tensor that a checkpoint recomputes.

    Each read would otherwise run the forward again, and with it whatever the forward changes, such as counters.
    """
    global _readers
    _readers += 1
    try:
        yield
    finally:
        _readers -= 1


def refuse_readers() -> None:
    """Raise if the graph is only looked at.

    Raises:
        NotSavedError: inside of ``nothing_recomputed``.
    """
    if _readers:
        raise NotSavedError("a checkpoint recomputes this tensor")


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` run functions directly: tensors are saved, and nothing is recomputed.

    Scripts import ``checkpoint`` by name, so the parts that it consists of are replaced.
    """
    module: Any = torch.utils.checkpoint
    hook, function = getattr(module, "_checkpoint_hook", None), getattr(module, "CheckpointFunction", None)
    with ExitStack() as stack:
        stack.enter_context(_exchanged(hook, "__enter__", lambda self: None))
        stack.enter_context(_exchanged(hook, "__exit__", lambda self, *error: None))
        stack.enter_context(_exchanged(function, "apply", staticmethod(_run)))
        yield


def _run(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a class attribute inside the block; do nothing if this version of torch lacks the class."""
    if owner is None:
        yield
        return
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
