"""The page about a night: the commit, the machine, and each piece with its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from datetime import datetime, timezone

from nightly_lane.piece import Piece, Result

MOST_NAMED = 30
"""The number of a piece's failures that are named; its log has all."""

DUE = "due"


def page(
    pieces: Sequence[Piece], results: Mapping[str, Result], here: Set[str], state: str, machine: Mapping[str, str]
) -> str:
    """Return the page as Markdown; ``state`` is the commit, and ``here`` names the pieces with valid results."""
    known = {piece.name: results[piece.name] for piece in pieces if piece.name in results}
    outcomes = Counter(known[piece.name].outcome if piece.name in here else DUE for piece in pieces)
    lines = [
        "# Nightly",
        "",
        f"`ci/nightly`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, commit {state}. "
        f"{len(here)} of {len(pieces)} pieces ran at this commit, or at one that differs in nothing that they read: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}; "
        f"{sum(known[name].seconds for name in here) / 60:.0f} minutes.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in machine.items()),
        "",
        "| piece | outcome | figures | minutes | commit |",
        "|---|---|---|--:|---|",
        *(_row(piece.name, known.get(piece.name), is_here=piece.name in here) for piece in pieces),
    ]
    for name, result in known.items():
        if result.said:
            named = result.said[:MOST_NAMED]
            left = len(result.said) - len(named)
            lines += ["", f"## {name}", "", *(f"- `{one}`" for one in named)]
            lines += [f"- and {left} more"] if left else []
    return "\n".join(lines) + "\n"


def _row(name: str, result: Result | None, *, is_here: bool) -> str:
    if result is None:
        return f"| {name} | {DUE} | – | – | – |"
    outcome = f"**{result.outcome}**" if result.has_failed else result.outcome
    outcome = outcome if is_here else f"{DUE}, last {outcome}"
    return f"| {name} | {outcome} | {_cell(result.figures) or '–'} | {result.seconds / 60:.1f} | {result.commit} |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
