"""What subjects do not declare, counted in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import pandas as pd

from harness.core.outcome import Outcome
from harness.results.records import Result
from harness.results.run import Run

_MOST_CAPABILITIES: Final = 3
_KINDS: Final = {"backend ": "backend", "precision ": "precision"}


def unsupported(run: Run, cells: pd.DataFrame) -> list[Result]:
    """Return the records of those ``cells`` of the run's cell table that their subjects do not declare."""
    names = set(cells["cell"][cells["outcome"] == Outcome.UNSUPPORTED.value])
    return [result for result in run.results if result.cell in names and result.outcome is Outcome.UNSUPPORTED]


def undeclared_in_words(results: Iterable[Result]) -> str:
    """Return for example ``263 cells are not declared by mine (backends dp, none: 188; precision 16: 75)``.

    ``results`` are records of unsupported cells. Of several subjects, each has its number.
    """
    every = list(results)
    cells = "1 cell is" if len(every) == 1 else f"{len(every)} cells are"
    subjects = Counter(result.subject for result in every)
    if len(subjects) > 1:
        each = ", ".join(f"{name} {count}" for name, count in subjects.items())
        return f"{cells} not declared by their subjects ({each})"
    reasons = "; ".join(f"{kind}: {count}" for kind, count in _reasons(every))
    return f"{cells} not declared by {next(iter(subjects), 'any subject')}" + (f" ({reasons})" if reasons else "")


def undeclared_kinds(results: Iterable[Result]) -> str:
    """Return what a subject does not declare, for example ``backends dp, none; precision 16``."""
    return "; ".join(kind for kind, _ in _reasons(list(results)))


def _reasons(results: Sequence[Result]) -> list[tuple[str, int]]:
    """Return what is not declared, with the number of cells that need it; each cell is counted once."""
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for result in results:
        if not result.undeclared:
            continue
        first = result.undeclared[0]
        kind = next((word for head, word in _KINDS.items() if first.startswith(head)), "capability")
        counts[kind] = counts.get(kind, 0) + 1
        names.setdefault(kind, []).extend(one.removeprefix(f"{kind} ") for one in result.undeclared)
    told = [(_listed(kind, list(dict.fromkeys(names[kind]))), counts[kind]) for kind in counts]
    others = len(results) - sum(counts.values())
    return [*told, ("other reasons", others)] if told and others else told


def _listed(kind: str, names: list[str]) -> str:
    plural = {"capability": "capabilities"}.get(kind, f"{kind}s")
    word = kind if len(names) == 1 else plural
    shown = names[:_MOST_CAPABILITIES] if kind == "capability" else names
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{word} {', '.join(shown)}{more}"
