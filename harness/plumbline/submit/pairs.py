"""Options of the form ``NAME=VALUE``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from plumbline.core.errors import PlanError


def pairs(option: str, given: Sequence[str], *, valueless: bool = False) -> dict[str, Any]:
    """Return the values by name; None for a name alone, which is refused unless ``valueless``.

    Raises:
        PlanError: A text does not have this form.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or valueless):
            raise PlanError(f"{option} {text!r} should look like NAME=VALUE")
        found[name] = value if equals else None
    return found


def variables(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``; a name alone takes the value in this process.

    Raises:
        PlanError: A text does not have this form, or this process has no such variable.
    """
    found: dict[str, str | None] = pairs("--env", given, valueless=True)
    for name in [name for name, value in found.items() if value is None]:
        if name not in os.environ:
            raise PlanError(f"--env {name}: this variable is not set: set it, or use --env {name}=VALUE")
        found[name] = os.environ[name]
    return {name: value or "" for name, value in found.items()}
