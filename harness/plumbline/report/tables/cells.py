"""A run's results as one table with a row per cell, from which the other tables are made; and counts of cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Final, TypeVar, cast

import pandas as pd

from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.report.text import listed
from plumbline.results.records import (
    KNOWN,
    PERFORMANCE,
    UNEXPECTED_PASS,
    CellRecord,
    Coordinates,
    Result,
    by_cell,
    ending,
)
from plumbline.results.run import Run

T = TypeVar("T")
MISSING: Final = "missing"
"""The outcome of a planned cell without a result. It is not in ``Outcome``, because no check ends this way."""

DECLINED: Final = (Outcome.UNSUPPORTED.value, Outcome.SKIPPED.value)
"""The outcomes of cells that were deliberately not trained."""

NOT_TRIED: Final = (*DECLINED, MISSING)
MARK_ORDER: Final = ("-", "Y", "C", "K", "?", "X", "N")
"""The marks of cells, least serious first. A group of cells gets the most serious of its marks."""

_MARK_OF: Final = {
    Outcome.UNSUPPORTED.value: "-",
    Outcome.PASSED.value: "Y",
    Outcome.DEVIATES.value: "C",
    KNOWN: "K",
    UNEXPECTED_PASS: "X",
    Outcome.FAILED.value: "N",
}

CELL_COLUMNS: Final = ("cell", *Coordinates._fields, "outcome", "has_failed", "error_x_noise", "seconds", "mark")
_MEASURED = (Outcome.PASSED, Outcome.DEVIATES, Outcome.FAILED)
_MOST_CAPABILITIES: Final = 3


def cached_per_run(make: Callable[[Run], T]) -> Callable[[Run], T]:
    """Compute ``make`` once for each run. The result is shared between the parts of a report: do not change it."""
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def cached(run: Run) -> T:
        # A run is not hashable. Attributes that are not fields do not take part in comparisons.
        attributes = vars(run)
        if name not in attributes:
            attributes[name] = make(run)
        return cast("T", attributes[name])

    return cached


@cached_per_run
def cell_table(run: Run) -> pd.DataFrame:
    """Return one row per cell, planned cells first and in their order; columns are ``CELL_COLUMNS``.

    ``outcome``: the worst of the cell's findings; ``known`` or ``unexpected pass`` if findings were expected to be
    bad (see ``ending``); or ``missing``. The cell that was being written when the run broke off is missing too, unless
    it is already bad: the findings that it lacks might not have passed. Cells that were only measured have no row.
    ``has_failed``: whether any finding failed unexpectedly, even if a worse outcome (a check that crashed, for
    example) hides it.
    ``error_x_noise``: the largest among findings that passed, deviate or failed; other outcomes measure nothing.
    ``seconds``: the wall time of the cell's launch. Both are NaN if there is no value.
    ``mark``: an ordered category, whose order is ``MARK_ORDER``.
    """
    measured = measured_only(run)
    findings = by_cell(result for result in run.results if result.coordinates not in measured)
    cells: dict[Coordinates, CellRecord] = {
        planned.coordinates: planned for planned in run.header.planned if planned.coordinates not in measured
    }
    for key, own in findings.items():
        cells.setdefault(key, own[0])
    rows: list[tuple[object, ...]] = []
    for key, cell in cells.items():
        found = findings.get(key, [])
        end = ending(found) if found else MISSING
        if key == run.cut_short and not (isinstance(end, Outcome) and end.is_bad):
            end = MISSING
        errors = [one.error_x_noise for one in found if one.outcome in _MEASURED and one.error_x_noise is not None]
        seconds = [one.seconds for one in found if one.seconds is not None]
        has_failed = any(one.outcome is Outcome.FAILED and not one.is_known for one in found)
        rows.append(
            (
                cell.cell,
                *key,
                str(end),
                has_failed,
                max(errors, default=None),
                max(seconds, default=None),
            )
        )
    table = pd.DataFrame(rows, columns=list(CELL_COLUMNS[:-1]))
    # Set explicitly, because pandas cannot infer types from an empty table or from rows without a value.
    table = table.astype({"has_failed": bool, "error_x_noise": float, "seconds": float})
    marks = table["outcome"].map(_MARK_OF).fillna("?").mask(table["has_failed"], "N")
    marked: pd.DataFrame = table.assign(mark=pd.Categorical(marks, list(MARK_ORDER), ordered=True))
    return marked


def mark_of(cells: pd.DataFrame) -> str:
    return str(cells["mark"].max())


def passed_of_tried(cells: pd.DataFrame) -> tuple[int, int]:
    outcomes = cells["outcome"]
    return int((outcomes == Outcome.PASSED.value).sum()), int((~outcomes.isin(NOT_TRIED)).sum())


def right_of_tried(cells: pd.DataFrame) -> tuple[int, int]:
    """Return how many cells are right, including those that match their backend's contract, and how many were tried."""
    passed, tried = passed_of_tried(cells)
    return passed + int((cells["outcome"] == Outcome.DEVIATES.value).sum()), tried


def mark_and_share(cells: pd.DataFrame) -> str:
    """Return for example ``N 3/5``: the mark, the number of right cells, and the number of trained cells."""
    right, tried = right_of_tried(cells)
    return f"{mark_of(cells)} {right}/{tried}" if tried else mark_of(cells)


def measured_only(run: Run) -> set[Coordinates]:
    """Return the cells that, by the plan or by their records, are only measured and not examined."""
    planned = {cell.coordinates for cell in run.header.planned if cell.measured}
    timed = {record.coordinates for record in run.measurements}
    timed |= {result.coordinates for result in run.results if result.check == PERFORMANCE}
    examined = {result.coordinates for result in run.results if result.check != PERFORMANCE}
    return planned | (timed - examined)


def outcome_counts(outcomes: Iterable[str]) -> dict[str, int]:
    found = Counter(outcomes)
    good = (Outcome.PASSED.value, Outcome.DEVIATES.value)
    bad = [outcome.value for outcome in Outcome if outcome.is_bad]
    return {name: found[name] for name in (*good, KNOWN, UNEXPECTED_PASS, *bad, *DECLINED, MISSING) if name in found}


def counts_in_words(outcomes: Iterable[str]) -> str:
    """Return for example ``60 cells: 57 passed, 2 deviates, 1 failed``."""
    counts = outcome_counts(outcomes)
    words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    return f"{counted(sum(counts.values()), 'cell')}: {words}" if words else "0 cells"


def unsupported(run: Run, cells: pd.DataFrame) -> list[Result]:
    """Return the records of the cells in ``cells``, rows of the cell table, that their subjects do not declare."""
    names = set(cells["cell"][cells["outcome"] == Outcome.UNSUPPORTED.value])
    return [result for result in run.results if result.cell in names and result.outcome is Outcome.UNSUPPORTED]


def undeclared_in_words(results: Iterable[Result]) -> str:
    """Return for example ``4 cells skipped: mine does not claim to support them (backend dp: 3; precision 16: 1)``."""
    records = list(results)
    cells = f"{counted(len(records), 'cell')} skipped:"
    them = "it" if len(records) == 1 else "them"
    subjects = Counter(result.subject for result in records)
    if len(subjects) > 1:
        each = ", ".join(f"{name} {count}" for name, count in subjects.items())
        return f"{cells} their subjects do not claim to support them ({each})"
    reasons = "; ".join(f"{kind}: {count}" for kind, count in _reasons(records))
    claim = f"{next(iter(subjects), 'the subject')} does not claim to support {them}"
    return f"{cells} {claim}" + (f" ({reasons})" if reasons else "")


def undeclared_kinds(results: Iterable[Result]) -> str:
    """Return what a subject does not declare, for example ``backends dp, none; precision 16``."""
    return "; ".join(kind for kind, _ in _reasons(list(results)))


def _reasons(results: Sequence[Result]) -> list[tuple[str, int]]:
    names: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for result in results:
        if result.undeclared:
            kind = next(
                (one for one in ("backend", "precision") if result.undeclared[0].startswith(f"{one} ")), "capability"
            )
            counts[kind] += 1
            names.setdefault(kind, []).extend(one.removeprefix(f"{kind} ") for one in result.undeclared)
    reasons = []
    for kind, found in names.items():
        distinct = list(dict.fromkeys(found))
        plural = "capabilities" if kind == "capability" else f"{kind}s"
        most = _MOST_CAPABILITIES if kind == "capability" else len(distinct)
        reasons.append((f"{kind if len(distinct) == 1 else plural} {listed(distinct, most)}", counts[kind]))
    others = len(results) - counts.total()
    return [*reasons, ("other reasons", others)] if reasons and others else reasons
