"""The probes of ``plumbline doctor``. They change nothing on the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeResult:
    """What a probe ``found``, and ``advice`` if something is wrong. ``is_note``: runs are possible all the same."""

    found: str
    advice: str | None = None
    is_note: bool = False
