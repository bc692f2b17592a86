"""Puts a function around another one, for good or until it is taken back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
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


class Patches:
    """What is replaced and registered inside of ``collected``, so that it can be taken back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._functions: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect what ``replace`` and ``undone_by`` are called with inside the block, on any thread."""
        _COLLECTING.append(self)
        try:
            yield
        finally:
            _COLLECTING.remove(self)

    def add(self, undo: Callable[[], None], *replaced: Any) -> None:
        """Call ``undo`` when all is taken back. ``replaced``: a function, and the one that stands in its place."""
        self._undo.append(undo)
        if replaced and isinstance(replaced[0], FunctionType):
            self._functions[id(replaced[0])] = replaced[0], replaced[1]

    def replace_imported(self) -> None:
        """Replace the functions also where modules other than torch's have imported them by name."""
        with self.collected():
            for module in list(sys.modules.values()):
                if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] in ("torch", "plumbline"):
                    continue  # torch's own modules see the original also where all is replaced before the script runs
                for name, value in list(vars(module).items()):
                    known = self._functions.get(id(value))
                    if known is not None and known[0] is value:
                        replace(module, name, known[1])

    def take_back(self) -> None:
        """Put back what is still in place, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._functions.clear()


_COLLECTING: list[Patches] = []
_ABSENT = object()


def replace(owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name``, of a module or class: for good, or until collected patches are taken back."""
    old, seen = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
    setattr(owner, name, new)

    def put_back() -> None:
        if vars(owner).get(name, _ABSENT) is not new:
            return  # somebody else has replaced it since
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    for patches in _COLLECTING:
        patches.add(put_back, seen, new)


def undone_by(undo: Callable[[], None]) -> None:
    """Call ``undo`` when collected patches are taken back; where none are collected, never."""
    for patches in _COLLECTING:
        patches.add(undo)


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replace ``owner.name`` by a function that calls ``around`` with the original and the arguments.

    Where there is no such name, nothing happens: versions of torch differ.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replace(owner, name, wrapper)


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

    replace(base, "__init_subclass__", classmethod(init_subclass))


def _classes(base: Any) -> Iterator[Any]:
    yield base
    for one in base.__subclasses__():
        yield from _classes(one)
