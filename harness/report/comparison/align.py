"""Which cell of one side answers to which of the other: two runs, or the cells of one run that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from harness.core.errors import PlumblineError

if TYPE_CHECKING:
    from harness.results.records import CellRecord, Coordinates, Measurement, Result
    from harness.results.run import Run


class NotAligned(PlumblineError):  # noqa: N818 - named after what is wrong
    """It cannot be told what is to be compared with what."""


@dataclass(frozen=True)
class Evidence:
    """All that a run says of one cell; ``cut_short``: it was being written when the run broke off."""

    cell: CellRecord
    results: tuple[Result, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    cut_short: bool = False


@dataclass(frozen=True)
class Pair:
    """Two cells that are held against each other; None where a side has none.

    ``cell`` says in words what they have in common, ``versus`` in what they differ (``dp → ddp``), if in anything.
    """

    cell: str
    versus: str
    a: Evidence | None
    b: Evidence | None


@dataclass(frozen=True)
class Alignment:
    """What is compared with what, in the plan's order, and what must be said of it."""

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...] = ()


PARTS: Final[Mapping[str, Callable[[CellRecord], str | int]]] = {
    "backend": lambda cell: cell.backend,
    "precision": lambda cell: cell.precision,
    "gpus": lambda cell: cell.gpus,
    "subject": lambda cell: cell.subject,
}
"""In what the cells of one run may be held against each other."""


def evidence(run: Run) -> dict[Coordinates, Evidence]:
    """Return what the run says of each cell, planned ones first and in their order."""
    cells: dict[Coordinates, CellRecord] = {}
    results: dict[Coordinates, list[Result]] = {}
    measurements: dict[Coordinates, list[Measurement]] = {}
    for cell in (*run.header.planned, *run.results, *run.measurements):
        cells.setdefault(cell.coordinates, cell)
    for result in run.results:
        results.setdefault(result.coordinates, []).append(result)
    for measurement in run.measurements:
        measurements.setdefault(measurement.coordinates, []).append(measurement)
    return {
        key: Evidence(cell, tuple(results.get(key, ())), tuple(measurements.get(key, ())), key == run.cut_short)
        for key, cell in cells.items()
    }


def between(a: Run, b: Run) -> Alignment:
    """Align two runs. Subjects go by their names; where each run has one, and they differ, by their position.

    Raises:
        NotAligned: there is nothing to align, or no subject that both have.
    """
    sides = (list(evidence(a).values()), list(evidence(b).values()))
    names = [list(dict.fromkeys(one.cell.subject for one in side)) for side in sides]
    for run, found in zip((a, b), names, strict=True):
        if not found:
            raise NotAligned(f"run {run.header.run_id} has no cells: there is nothing to compare")
    notes: tuple[str, ...] = ()
    if len(names[0]) == len(names[1]) == 1:
        if names[0] != names[1]:
            notes = (f"Subjects are aligned by position: {names[0][0]} (A) against {names[1][0]} (B).",)
    elif not set(names[0]) & set(names[1]):
        raise NotAligned(
            f"the subjects of A ({', '.join(names[0])}) and of B ({', '.join(names[1])}) have no name in common: "
            "compare runs of one subject each"
        )
    several = not (len(names[0]) == len(names[1]) == 1)
    # By accelerator too would be to find nothing to compare between a simulated run and a real one.
    before, after = ({_place(one.cell, several): one for one in side} for side in sides)
    pairs = tuple(
        Pair(_words(place), "", before.get(place), after.get(place)) for place in dict.fromkeys((*before, *after))
    )
    return Alignment(pairs, notes)


def within(run: Run, by: str) -> Alignment:
    """Align the cells of one run that differ in nothing but ``by``, one of ``PARTS``, with the first of them.

    First is what comes first in the run's plan; of gpus the fewest; ``auto``, which is no backend but the trainer's
    choice of one, comes last. Where a group of cells lacks the first value, the next one takes its place.

    Raises:
        NotAligned: all cells have one and the same value, or none has a counterpart.
    """
    part = PARTS[by]
    groups: dict[tuple[str | None, ...], dict[str | int, Evidence]] = {}
    labels: dict[tuple[str | None, ...], str] = {}
    cells = list(evidence(run).values())
    several = len({one.cell.subject for one in cells}) > 1
    for one in cells:
        place = _without(one.cell, by, several)
        groups.setdefault(place, {})[part(one.cell)] = one
        labels[place] = _words(place)
    values = list(dict.fromkeys(part(one.cell) for one in cells))
    values.sort(key=lambda value: value if isinstance(value, int) else value == "auto")
    if len(values) < 2:
        found = f"they have {values[0]}" if values else "there are no cells"
        raise NotAligned(f"run {run.header.run_id} has nothing to compare by {by}: {found}")
    pairs = []
    alone = 0
    for place, group in groups.items():
        present = [value for value in values if value in group]
        alone += len(present) == 1
        pairs += [
            Pair(labels[place], f"{present[0]} → {value}", group[present[0]], group[value]) for value in present[1:]
        ]
    if not pairs:
        raise NotAligned(f"run {run.header.run_id} has nothing to compare by {by}: no two cells differ in it alone")
    notes = (f"Cells without a counterpart that differs in {by} alone: {alone}.",) if alone else ()
    return Alignment(tuple(pairs), notes)


def _words(place: tuple[str | None, ...]) -> str:
    return " ".join(part for part in place if part)


def _place(cell: CellRecord, several: bool) -> tuple[str | None, ...]:
    """Return what says where a cell is in the matrix; its subject only where there are several."""
    subject = cell.subject if several else None
    return subject, cell.workload, cell.backend, f"{cell.num_nodes}x{cell.gpus}", cell.precision


def _without(cell: CellRecord, by: str, several: bool) -> tuple[str | None, ...]:
    subject, workload, backend, topology, precision = _place(cell, several)
    nodes = f"{cell.num_nodes} node{'s' if cell.num_nodes > 1 else ''}"
    return (
        None if by == "subject" else subject,
        workload,
        None if by == "backend" else backend,
        nodes if by == "gpus" else topology,
        None if by == "precision" else precision,
    )
