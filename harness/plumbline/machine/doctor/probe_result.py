"""The result of a probe of this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeResult:
    """``found`` describes what is there; ``advice`` says what to do about it, None where nothing is wrong.

    ``is_note``: the machine is fit for a run all the same.
    """

    found: str
    advice: str | None = None
    is_note: bool = False
