"""The trainer whose method steps an optimizer, which knows what the optimizer itself does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def stepping_object(has_what_is_needed: Callable[[Any], bool]) -> Any:
    """Return the innermost object with a running method for which the condition holds, None without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self")
        if own is not None and has_what_is_needed(own):
            return own
        frame = frame.f_back
    return None
