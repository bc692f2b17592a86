"""Puts a function around another one, for good, so that names imported from it later are the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``around(owner.name)``; where there is no such name, nothing happens."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(around(original)))


def attempt(note: Callable[..., T], *args: Any) -> T | None:
    """Call what takes a note inside of a function of the script's: if that fails, it returns None, and is not noted."""
    try:
        return note(*args)
    except Exception:
        return None
