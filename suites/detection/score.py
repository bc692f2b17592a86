"""Computes the judge's score from the result of each cell, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PRECISIONS = ("64", "32", "16", "bf16", "bf16-true", "bf16-master")
"""In the order of the tables."""


@dataclass(frozen=True)
class Tried:
    """One trainer on one cell.

    ``family`` is the name of the trainer's file, or ``right`` for a known-good trainer. ``caught``: a check ended
    badly. ``named``: the diagnosis names a cause of an expected family. ``caused``: it names an expected cause.
    ``cause`` is the named cause, or None. ``unseen``: no check can see the mistake yet. ``nameless``: the mistake has
    no name.

    ``steps`` is the number of steps up to the first bad finding, or None if there is none. ``error`` is the largest
    measured error relative to the limit, or None if nothing was measured: samples are counted, and exact workloads
    compare bits. ``mesh`` is the backend if ranks hold parts of a model or of a sequence, and None otherwise.
    """

    family: str
    trainer: str
    cell: str
    caught: bool
    named: bool
    caused: bool
    unseen: bool
    steps: int | None
    precision: str = "32"
    error: float | None = None
    nameless: bool = False
    cause: str | None = None
    mesh: str | None = None


def table(tried: Sequence[Tried]) -> list[str]:
    """Return the score as lines of Markdown: a table by family, the totals last."""
    lines = [
        "| family | trainers | cells | caught | family right | cause right | median steps | most steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bad = [one for one in tried if one.family != "right"]
    for family in sorted({one.family for one in bad}):
        lines.append(_row(family, [one for one in bad if one.family == family]))
    good = [one for one in tried if one.family == "right"]
    alarms = sum(one.caught for one in good)
    seen = [one for one in bad if not one.unseen]
    missing = sorted({one.trainer for one in bad if one.unseen})
    lines.append("")
    if missing:
        lines.append(f"not examined yet: {', '.join(missing)}")
    lines += [
        f"trainers: {_score(_by_trainer(seen))}, false alarms {sum(_alarmed(good))} of {len(_alarmed(good))}",
        f"cells: {_score(seen)}, false alarms {alarms} of {len(good)}",
        f"steps needed: {_steps(seen, statistics.median)} in the median, {_steps(seen, max)} at most",
        "",
    ]
    meshes = [[one for one in tried if one.mesh is not None] for tried in (seen, good)]
    return [
        *lines,
        *_not_caused(seen),
        *margins("precision", seen, good, lambda one: (one.precision,)),
        "",
        "where ranks hold parts of a model or of a sequence:",
        "",
        *margins("precision", *meshes, lambda one: (one.precision,)),
        "",
        *margins("mesh, precision", *meshes, lambda one: (one.mesh, one.precision)),
    ]


def _not_caused(seen: Sequence[Tried]) -> list[str]:
    """Return a table of the caught mistakes without a right cause, with the causes that were named instead."""
    wrong = [one for one in seen if one.caught and not one.caused and not one.nameless]
    if not wrong:
        return []
    lines = ["not named by a right cause:", "", "| trainer | cells | cause in its place |", "|---|---|---|"]
    for trainer in sorted({one.trainer for one in wrong}):
        own = [one for one in wrong if one.trainer == trainer]
        instead = ", ".join(sorted({one.cause or "none" for one in own}))
        lines.append(f"| {trainer} | {len(own)} of {sum(one.trainer == trainer for one in seen)} | {instead} |")
    return [*lines, ""]


def margins(
    name: str, bad: Sequence[Tried], good: Sequence[Tried], group: Callable[[Tried], tuple[str, ...]]
) -> list[str]:
    """Return how close right trainers come to the limit, and how close wrong ones stay to it: a row per ``group``.

    A group's last entry is a precision. ``name`` is the heading of the groups.
    """
    lines = [
        f"| {name} | right: most × limit | wrong: least × limit | margin, decades | least wrong |",
        "|---|---|---|---|---|",
    ]
    right, wrong = (
        [one for one in tried if one.error is not None and one.caught is caught]
        for tried, caught in ((good, False), (bad, True))
    )
    for own in sorted({*map(group, right), *map(group, wrong)}, key=lambda own: (*own[:-1], PRECISIONS.index(own[-1]))):
        errors = [one.error for one in right if group(one) == own]
        caught = [one for one in wrong if group(one) == own]
        most, least = max(errors, default=None), min(caught, key=lambda one: one.error, default=None)
        cells = (
            ", ".join(own),
            "" if most is None else f"{most:.2g} ({len(errors)} cells)",
            "" if least is None else f"{least.error:.2g} ({len(caught)} cells)",
            f"{math.log10(least.error / most):.1f}" if least is not None and most else "",
            "" if least is None else least.cell,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _row(family: str, tried: list[Tried]) -> str:
    seen = [one for one in tried if not one.unseen]
    unseen = "" if len(seen) == len(tried) else f" (and {len(tried) - len(seen)} unseen)"
    others = sum(one.nameless for one in seen)
    nameless = f" (and {others} of no family)" if others else ""
    cells = (
        family,
        str(len({one.trainer for one in tried})),
        f"{len(seen)}{unseen}",
        f"{sum(one.caught for one in seen)}",
        f"{sum(one.named for one in seen)}{nameless}",
        f"{sum(one.caused for one in seen)}",
        _steps(seen, statistics.median),
        _steps(seen, max),
    )
    return f"| {' | '.join(cells)} |"


def _by_trainer(tried: list[Tried]) -> list[Tried]:
    """Return one entry per trainer: caught, or named, only if it was on all of its cells."""
    trainers: dict[str, list[Tried]] = {}
    for one in tried:
        trainers.setdefault(one.trainer, []).append(one)
    return [
        Tried(
            own[0].family,
            name,
            "",
            all(o.caught for o in own),
            all(o.named for o in own),
            all(o.caused for o in own),
            False,
            None,
            nameless=own[0].nameless,
        )
        for name, own in trainers.items()
    ]


def _alarmed(good: list[Tried]) -> list[bool]:
    return [any(one.caught for one in good if one.trainer == name) for name in sorted({one.trainer for one in good})]


def _score(tried: list[Tried]) -> str:
    named = [one for one in tried if not one.nameless]
    caught = f"caught {sum(one.caught for one in tried)} of {len(tried)}"
    families = f"family right {sum(one.named for one in named)} of {len(named)}"
    return f"{caught}, {families}, cause right {sum(one.caused for one in named)} of {len(named)}"


def _steps(tried: list[Tried], summary) -> str:
    steps = [one.steps for one in tried if one.steps is not None]
    return f"{summary(steps):g}" if steps else ""
