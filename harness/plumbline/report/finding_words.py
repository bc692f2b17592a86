"""A finding in words: where it was observed, and how large its error is."""

from __future__ import annotations

from plumbline.core.finding import AnyFinding
from plumbline.report.text import printable, x_noise


def location(finding: AnyFinding) -> list[str]:
    """Return where a finding was observed, for example ``["step 0", "rank 1", "parameter head.weight"]``."""
    where = {"step": finding.step, "rank": finding.rank, "parameter": finding.parameter}
    return [f"{name} {printable(str(value))}" for name, value in where.items() if value is not None]


def place_and_size(finding: AnyFinding) -> str:
    """Return where, and how large: ``step 0, rank 1, parameter head.weight, 57 × noise``; "" where neither is known."""
    size = [] if finding.error_x_noise is None else [x_noise(finding.error_x_noise)]
    return ", ".join(location(finding) + size)
