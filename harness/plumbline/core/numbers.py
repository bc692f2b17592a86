"""Formats numbers for people, in the same way in every message, table and page."""

from __future__ import annotations

import math


def compact(number: float) -> str:
    """Return a number in two digits: ``0.80``, ``57``, ``4.0e6``, ``inf``; an empty string for a missing one (NaN)."""
    if math.isnan(number):
        return ""
    if math.isinf(number):
        return str(number)
    size = abs(number)
    if size == 0:
        return "0"
    if 1e-3 <= size < 9999.5:
        return f"{number:.0f}" if size >= 9.95 else f"{number:#.2g}"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def scale_text(scale: float) -> str:
    """Return a loss scale: ``65,536``, ``0.5``."""
    return f"{scale:,.0f}" if math.isfinite(scale) and scale == round(scale) else f"{scale:,g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return for example ``1 cell``, ``3 cells``; ``plural`` is needed if it is not the noun with an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def x_noise(error: float) -> str:
    """Return a multiple of rounding noise: ``0.80 × noise``, ``2.0e6 × noise``."""
    return f"{compact(error) or error} × noise"
