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
    if not parameters:
        return []
    rows = _few(parameters)
    names = [shortened(printable(name), LONGEST_NAME) for name, _ in rows]
    width = max(map(len, names))
    allowed = "" if limit is None else f", right up to {compact(limit)}"
    lines = [f"  {'parameter':{width}}  × noise{allowed}"]
    for name, (_, error) in zip(names, rows, strict=True):
        wrong = limit is not None and not error <= limit
        lines.append(f"  {name:{width}}  {compact(error):>7}{'  wrong' if wrong else ''}")
    return lines


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
