"""The page of the judge's hunt: counts from the records, with what people found out about each accusation.

Hand-written explanations are in ``explained.toml``, so that the page can be generated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found, unused-ignore]  # programs of ci run on Python 3.11
from hunt_records import Counts, Tried, accused, by_kind, escaped, percent

NOTES = Path(__file__).parent / "explained.toml"
NOT_EXPLAINED = "**not explained yet**"


def page(tried: Iterable[Tried], notes: dict[str, Any] | None = None) -> list[str]:
    """Return the page as lines of Markdown."""
    tried, notes = list(tried), notes or tomllib.loads(NOTES.read_text("utf-8"))
    return [
        "# The judge's own hunt",
        "",
        notes["introduction"].strip(),
        "",
        *_runs(tried, notes["runs"]),
        "",
        "## Right trainers that were accused",
        "",
        *_table(accused(tried), ("check and cause", lambda one: f"`{one.check}`: {one.cause}"), notes["accused"]),
        "",
        notes["about_accused"].strip(),
        "",
        "## Mutations that escaped",
        "",
        *_table(escaped(tried), ("mutation", mutation_in_words), notes["escaped"], *_SIZES),
        "",
        "## By kind of mutation",
        "",
        notes["about_kinds"].strip(),
        "",
        *by_kind(tried),
    ]


def _runs(tried: Sequence[Tried], runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| seeds | judge | right trainers | accused | mutations scored | caught | named, of those with a name |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    every = [seed for run in runs for seed in run["seeds"]]
    for own, judge in [*((run["seeds"], run["judge"]) for run in runs), (every, "all of them")]:
        counts = Counts.of(one for one in tried if one.seed in own)
        seeds = ", ".join(map(str, own))
        caught = f"{counts.caught} ({percent(counts.caught, counts.scored)})" if counts.scored else "-"
        named = "-"
        if counts.nameable:
            named = f"{counts.named} of {counts.nameable} ({percent(counts.named, counts.nameable)})"
        cells = (seeds, judge, counts.right, counts.accused, counts.scored, caught, named)
        yield f"| {' | '.join(map(str, cells))} |"


_SIZES = (
    ("apart", lambda one: f"{one.difference:.1e}" if one.difference < float("inf") else "other steps"),
    ("largest error × limit", lambda one: f"{one.x_limit or 0:.2g}"),
)


def _table(listed: Sequence[Tried], what: Any, explained: dict[str, str], *more: Any) -> Iterator[str]:
    """Yield a row per training: seed and number, cell, the given columns, and the explanation."""
    columns = [what, *more]
    if not listed:
        yield "None."
        return
    yield f"| draw | cell | {' | '.join(title for title, _ in columns)} | why |"
    yield f"|---|---|{'---|' * len(columns)}---|"
    for one in listed:
        draw = f"{one.seed}/{one.number}"
        reason = explained.get(draw, NOT_EXPLAINED)
        _, backend, topology, precision = one.cell.rsplit("-", 3)
        values = [str(value(one)) for _, value in columns]
        yield f"| {draw} | {backend} {topology} {precision} | {' | '.join(values)} | {reason} |"


def mutation_in_words(one: Tried) -> str:
    """Return what a mutation does, where and when, in words."""
    made = one.mutation or {}
    words = [f"{made['place']}: {made['operation']}"]
    words += [f"× {made['factor']}"] if made["operation"] == "rescaled" else []
    words += [f"to {made['dtype']}"] if made["operation"] == "cast" else []
    words += ["on all ranks" if made["rank"] is None else f"on rank {made['rank']}"]
    words += [f"from step {made['step']} on" if made["lasting"] else f"at step {made['step']}"]
    return " ".join(words)
