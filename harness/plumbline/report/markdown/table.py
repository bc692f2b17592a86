"""Tables as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_RULES: Final = {"l": "---", "c": ":-:", "r": "--:"}


def markdown_table(columns: Sequence[str], alignment: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. ``alignment`` has ``l``, ``c`` or ``r`` for each column; texts are Markdown already."""
    lines = [columns, [_RULES[side] for side in alignment], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
