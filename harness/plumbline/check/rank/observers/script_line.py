"""Notes the line of the user's script from which the first optimizer step was taken."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import Observer

_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = (
    f"{Path(__file__).parents[3]}{os.sep}",  # this package
    f"{Path(sys.modules['torch'].__file__ or '').parent}{os.sep}",
    f"{os.path.dirname(os.__file__)}{os.sep}",
)


class ScriptLineObserver(Observer):
    """Notes ``file`` and ``line`` of the innermost call on the stack of the first step that no library makes.

    The file is relative to the working directory if it lies below it.
    """

    name = "script"

    def __init__(self) -> None:
        self._facts: Facts | None = None

    def first_step(self, optimizer: Optimizer) -> None:
        if self._facts is None:
            self._facts = _calling_line()

    def final_facts(self) -> Facts | None:
        """Return the place, None if every call is a library's."""
        return self._facts


def _calling_line() -> Facts | None:
    frame = sys._getframe()
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if _is_users(file):
            below = os.path.relpath(file)
            return {"file": file if below.startswith(os.pardir) else below, "line": frame.f_lineno}
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_users(file: str) -> bool:
    return (
        os.path.isfile(file)
        and not file.startswith(_LIBRARIES)
        and not any(part in Path(file).parts for part in _PACKAGES)
    )
