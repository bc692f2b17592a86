"""Puts a function around another one, so that names imported from it later are the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

Around = Callable[..., Any]
"""Takes the original function, then its arguments, and returns what the original returns."""


def attempt(note: Callable[..., T], *args: Any) -> T | None:
    """Call what takes a note inside of a function of the script's: if that fails, it returns None, and is not noted."""
    try:
        return note(*args)
    except Exception:
        return None


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replace ``owner.name`` by a function that calls ``around`` with the original and the arguments, for good.

    Where there is no such name, nothing happens: versions of torch differ.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def wrap_overrides(base: Any, name: str, around: Around) -> None:
    """Wrap a method of a class and of all its subclasses that have their own, those still to come included.

    A method that calls its base class's is seen twice: ``around`` has to know which call is the outermost.
    """
    for one in _classes(base):
        if name in vars(one):
            wrap(one, name, around)
    announced = base.__init_subclass__.__func__ if "__init_subclass__" in vars(base) else None

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs) if announced is None else announced(cls, **kwargs)
        if name in vars(cls):
            wrap(cls, name, around)

    base.__init_subclass__ = classmethod(init_subclass)


def _classes(base: Any) -> Iterator[Any]:
    yield base
    for one in base.__subclasses__():
        yield from _classes(one)
