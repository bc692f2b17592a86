"""An observer that takes notes inside of functions and methods of torch, and cannot fail in the script's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer


class WrappingObserver(Observer):
    """An observer that wraps functions of torch. It takes notes between ``start`` and ``stop``, and while it is well.

    ``error`` says why it takes no notes any more, "" while it does.
    """

    essential = True

    def __init__(self) -> None:
        self.error = ""

    def final_facts(self) -> Facts | None:
        return {"error": self.error} if self.error else None

    @contextmanager
    def notes(self) -> Iterator[None]:
        """Keep an exception in the body, which takes notes, from the script."""
        try:
            yield
        except Exception as error:  # whatever it is, it is not the script's
            self.recording = False
            self.error = f"{type(error).__name__}: {error}"
