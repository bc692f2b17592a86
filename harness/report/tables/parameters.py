"""Where an error starts: how far each parameter is from right, as a small table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.report.text import compact, printable, shortened

MOST_ROWS = 16
LONGEST_NAME = 48


def parameter_table(parameters: Sequence[tuple[str, float]], limit: float | None) -> list[str]:
    """Return a line for each parameter, or for each module where they are many; nothing where there are none.

    ``limit`` is how many × noise a right trainer may show: what is above is marked.
    """
    rows = parameter_rows(parameters, limit)
    if not rows:
        return []
    width = max(len(name) for name, _, _ in rows)
    allowed = "" if limit is None else f", right up to {compact(limit)}"
    lines = [f"  {'parameter':{width}}  × noise{allowed}"]
    lines += [f"  {name:{width}}  {compact(error):>7}{'  wrong' if wrong else ''}" for name, error, wrong in rows]
    return lines


def parameter_rows(parameters: Sequence[tuple[str, float]], limit: float | None) -> list[tuple[str, float, bool]]:
    """Return the table's rows: a name, its error × noise, and whether that is above ``limit``."""
    if not parameters:
        return []
    return [
        (shortened(printable(name), LONGEST_NAME), error, limit is not None and not error <= limit)
        for name, error in _few(parameters)
    ]


def _few(parameters: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the worst of each module, with names as long as their number allows; what is no number is infinite."""
    deepest = max(name.count(".") for name, _ in parameters)
    for depth in range(deepest + 1, 0, -1):
        modules: dict[str, float] = {}
        for name, error in parameters:
            module = ".".join(name.split(".")[:depth])
            modules[module] = max(modules.get(module, 0.0), math.inf if math.isnan(error) else error)
        if len(modules) <= MOST_ROWS:
            return list(modules.items())
    worst = sorted(modules, key=lambda module: -modules[module])[:MOST_ROWS]
    return [(module, error) for module, error in modules.items() if module in worst]
