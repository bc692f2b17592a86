"""``NAME=VALUE`` as options have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core.errors import PlanError


def pairs(option: str, given: Sequence[str], *, valueless: bool = False) -> dict[str, Any]:
    """Return the values by name; None for a name alone, which is refused unless ``valueless``.

    Raises:
        PlanError: a text has another form.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or valueless):
            raise PlanError(f"{option} {text!r} should look like NAME=VALUE")
        found[name] = value if equals else None
    return found
