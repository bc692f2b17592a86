"""Parses ``--subject``: where a trainer is, and which interpreter runs it."""

from __future__ import annotations

import shutil

from plumbline.core.errors import PlanError


def parse_subject(text: str) -> tuple[str, str | None]:
    """Split ``locator;python=/path/to/python`` into the locator and the interpreter, None for this one.

    Raises:
        PlanError: the text is invalid, or the interpreter does not exist.
    """
    locator, _, settings = text.partition(";")
    python = None
    for setting in filter(None, settings.split(";")):
        name, _, value = setting.partition("=")
        if name.strip() != "python" or not value:
            raise PlanError(f"--subject {text!r}: only python=/path/to/python may follow the semicolon")
        python = value.strip()
        if shutil.which(python) is None:
            raise PlanError(f"--subject {text!r}: interpreter {python} not found")
    if not locator:
        raise PlanError(f"--subject {text!r} names no subject")
    return locator, python
