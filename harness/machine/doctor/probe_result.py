"""One line of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeResult:
    """``found`` is what is there; ``advice`` what to do about it, None where all is well.

    ``is_note``: the machine is fit for a run all the same.
    """

    found: str
    advice: str | None = None
    is_note: bool = False
