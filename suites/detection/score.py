"""The score of the judge, from what became of each cell. Pure: values in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """One trainer on one cell.

    ``family`` is that of the file the trainer lies in, ``right`` for the known-good. ``caught``: a check ended badly;
    ``named``: with a cause and a right family, as far as the judge can see the mistake at all (``unseen`` if not).
    ``steps`` is how many steps the evidence needed until the first bad finding, None where nothing was found.
    """

    family: str
    trainer: str
    cell: str
    caught: bool
    named: bool
    unseen: bool
    steps: int | None


def table(tried: Sequence[Tried]) -> list[str]:
    """Return the score as lines of Markdown: a table by family, the totals last."""
    lines = [
        "| family | trainers | cells | caught | family right | median steps | most steps |",
        "|---|---|---|---|---|---|---|",
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
    ]
    return lines


def _row(family: str, tried: list[Tried]) -> str:
    seen = [one for one in tried if not one.unseen]
    unseen = "" if len(seen) == len(tried) else f" (and {len(tried) - len(seen)} unseen)"
    cells = (
        family,
        str(len({one.trainer for one in tried})),
        f"{len(seen)}{unseen}",
        f"{sum(one.caught for one in seen)}",
        f"{sum(one.named for one in seen)}",
        _steps(seen, statistics.median),
        _steps(seen, max),
    )
    return f"| {' | '.join(cells)} |"


def _by_trainer(tried: list[Tried]) -> list[Tried]:
    """Return one entry a trainer: caught, and named, only if it was on all of its cells."""
    trainers: dict[str, list[Tried]] = {}
    for one in tried:
        trainers.setdefault(one.trainer, []).append(one)
    return [
        Tried(own[0].family, name, "", all(o.caught for o in own), all(o.named for o in own), False, None)
        for name, own in trainers.items()
    ]


def _alarmed(good: list[Tried]) -> list[bool]:
    return [any(one.caught for one in good if one.trainer == name) for name in sorted({one.trainer for one in good})]


def _score(tried: list[Tried]) -> str:
    count = len(tried)
    return (
        f"caught {sum(one.caught for one in tried)} of {count}, "
        f"family right {sum(one.named for one in tried)} of {count}"
    )


def _steps(tried: list[Tried], summary) -> str:
    steps = [one.steps for one in tried if one.steps is not None]
    return f"{summary(steps):g}" if steps else ""
