"""Wraps functions and methods of torch in code that takes notes, and that cannot fail in the script's place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.check.evidence.training import Facts
from harness.check.rank.observer import Observer
from harness.check.rank.pause import is_paused

Around = Callable[..., Any]
"""Takes the original function, then its arguments, and returns what the original returns."""


class WrappingObserver(Observer):
    """An observer that wraps functions of torch. It takes notes between ``start`` and ``stop``, and while it is well.

    ``error`` says why it takes no notes any more, "" while it does.
    """

    def __init__(self) -> None:
        self.recording = False
        self.error = ""

    def start(self) -> None:
        """Take notes from now on."""
        self.recording = True

    def stop(self) -> None:
        """Take no more notes."""
        self.recording = False

    def final_facts(self) -> Facts | None:
        """Return the error that ended the notes, if there was one."""
        return {"error": self.error} if self.error else None

    @property
    def attends(self) -> bool:
        """Whether what runs now is the script's, and notes are taken of it."""
        return self.recording and not is_paused()

    @contextmanager
    def notes(self) -> Iterator[None]:
        """Keep an exception in the body, which takes notes, from the script."""
        try:
            yield
        except Exception as error:  # whatever it is, it is not the script's
            self.recording = False
            self.error = f"{type(error).__name__}: {error}"


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replace ``owner.name`` by a function that calls ``around`` with the original and the arguments."""
    original = getattr(owner, name)

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
