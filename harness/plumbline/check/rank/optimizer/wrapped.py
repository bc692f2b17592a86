"""An observer that takes notes inside functions and methods of torch, without raising its own errors in the script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer


class WrappingObserver(Observer):
    """An observer that wraps functions of torch. It takes notes between ``start`` and ``stop``, until it fails.

    ``error`` says why it takes no more notes, "" while it does.
    """

    essential = True

    def __init__(self) -> None:
        self.error = ""

    def final_facts(self) -> Facts | None:
        return {"error": self.error} if self.error else None

    @contextmanager
    def notes(self) -> Iterator[None]:
        """Keep exceptions in the body, which takes notes, away from the script."""
        try:
            yield
        except Exception as error:  # any error here is the observer's, not the script's
            self.recording = False
            self.error = f"{type(error).__name__}: {error}"
