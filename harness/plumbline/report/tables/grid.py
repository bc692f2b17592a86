"""The support grid: a table a subject, its backends and precisions over topologies; each square has its cells."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from plumbline.core.finding import in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import (
    cached_per_run,
    cell_table,
    counts_in_words,
    undeclared_in_words,
)
from plumbline.report.tables.failures import is_wrong
from plumbline.report.tables.support import Configuration, mark, passed_of_tried, reading_order
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Coordinates, Result, by_cell
from plumbline.results.run import Run

MARK_OF: Final = {
    Outcome.PASSED.value: "Y",
    Outcome.DEVIATES.value: "C",
    KNOWN: "K",
    UNEXPECTED_PASS: "X",
    Outcome.FAILED.value: "N",
    Outcome.UNSUPPORTED.value: "-",
}
"""The mark of a single cell by its outcome; every other outcome has ``?``."""


@dataclass(frozen=True)
class GridCell:
    """One cell with its findings by kind.

    ``bad`` findings need action, the one that explains the others first; ``known`` ones do not; ``deviating`` ones
    match what the backend specifies; ``passed`` are names of checks.
    ``worst`` is the finding with the largest error × noise of those that passed or deviate. ``anchor`` is the cell's
    address within a page.
    """

    cell: str
    anchor: str
    coordinates: Coordinates
    outcome: str
    has_failed: bool
    seconds: float | None
    bad: tuple[Result, ...]
    known: tuple[Result, ...]
    deviating: tuple[Result, ...]
    others: tuple[Result, ...]
    passed: tuple[str, ...]
    worst: Result | None
    reproduce: str

    @property
    def workload(self) -> str:
        return self.coordinates.workload

    @property
    def topology(self) -> tuple[int, int]:
        return self.coordinates.topology

    @property
    def error(self) -> float | None:
        """The largest error × noise of what went wrong, or of what passed if nothing did."""
        wrong = [one.error_x_noise for one in (*self.bad, *self.known) if one.error_x_noise is not None]
        return max(wrong) if wrong else self.worst.error_x_noise if self.worst and not self.bad else None

    @property
    def mark(self) -> str:
        """The cell's mark, one of ``MARKS``."""
        return MARK_OF.get(self.outcome, "?")


@dataclass(frozen=True)
class GridSquare:
    """The cells of one backend and precision on one topology; ``passed`` and ``tried`` are numbers of cells."""

    nodes: int
    gpus: int
    mark: str
    passed: int
    tried: int
    counts: str
    command: str
    cells: tuple[GridCell, ...]


@dataclass(frozen=True)
class GridRow:
    """One backend in one precision. ``squares`` follow the grid's topologies, None where there is no cell."""

    backend: str
    precision: str
    mark: str
    squares: tuple[GridSquare | None, ...]

    @property
    def cells(self) -> list[GridCell]:
        return [cell for square in self.squares if square for cell in square.cells]


@dataclass(frozen=True)
class Grid:
    """All cells of one subject on one accelerator. ``topologies`` are nodes and gpus of each.

    ``undeclared`` are the backends and precisions of which the subject declares no cell, with their numbers of cells;
    ``undeclared_in_words`` counts all cells that are not declared.
    """

    subject: str
    accelerator: str
    topologies: tuple[tuple[int, int], ...]
    rows: tuple[GridRow, ...]
    goes_wrong: bool
    counts: str
    undeclared: tuple[tuple[str, str, int], ...] = ()
    undeclared_in_words: str = ""


@cached_per_run
def grids(run: Run) -> list[Grid]:
    """Return a grid for each subject and accelerator, in the order of the run."""
    rows = cell_table(run).to_dict("records")
    findings = by_cell(run.results)
    subjects: dict[tuple[str, str], list[GridCell]] = {}
    for row, anchor in zip(rows, _anchors(row["cell"] for row in rows), strict=True):
        cell = _cell(row, anchor, findings)
        subjects.setdefault((row["subject"], row["accelerator"]), []).append(cell)
    return [_grid(subject, accelerator, cells) for (subject, accelerator), cells in subjects.items()]


def _grid(subject: str, accelerator: str, cells: Sequence[GridCell]) -> Grid:
    places = {cell.topology for cell in cells if cell.mark != "-"} or {cell.topology for cell in cells}
    topologies = sorted(places, key=lambda one: (one[0] * one[1], one[0]))
    rows: dict[Configuration, list[GridCell]] = {}
    for cell in cells:
        at = cell.coordinates
        row = Configuration(subject, at.backend, False, False, at.precision, accelerator)
        rows.setdefault(row, []).append(cell)
    ordered = sorted(rows, key=reading_order)
    folded = [row for row in ordered if _mark(rows[row]) == "-"]
    declined = [finding for cell in cells for finding in cell.others if finding.outcome is Outcome.UNSUPPORTED]
    return Grid(
        subject,
        accelerator,
        tuple(topologies),
        tuple(_row(row, rows[row], topologies) for row in ordered if row not in folded),
        any(cell.bad for cell in cells),
        counts_in_words(cell.outcome for cell in cells),
        tuple((row.backend, row.precision, len(rows[row])) for row in folded),
        undeclared_in_words(declined) if declined else "",
    )


def _row(configuration: Configuration, cells: Sequence[GridCell], topologies: Sequence[tuple[int, int]]) -> GridRow:
    squares: dict[tuple[int, int], list[GridCell]] = {}
    for cell in cells:
        squares.setdefault(cell.topology, []).append(cell)
    return GridRow(
        configuration.backend,
        configuration.precision,
        _mark(cells),
        tuple(_square(configuration, place, squares[place]) if place in squares else None for place in topologies),
    )


def _square(configuration: Configuration, topology: tuple[int, int], cells: Sequence[GridCell]) -> GridSquare:
    nodes, gpus = topology
    whole = replace(configuration, several_devices=nodes * gpus > 1, several_nodes=nodes > 1)
    return GridSquare(
        nodes,
        gpus,
        _mark(cells),
        *passed_of_tried(cell.outcome for cell in cells),
        counts_in_words(cell.outcome for cell in cells),
        whole.command({gpus}, {nodes}),
        tuple(sorted(cells, key=lambda cell: not cell.bad)),
    )


def _mark(cells: Sequence[GridCell]) -> str:
    return mark((cell.outcome for cell in cells), has_failed=any(cell.has_failed for cell in cells))


def _cell(row: Mapping[Hashable, Any], anchor: str, every: Mapping[Coordinates, Sequence[Result]]) -> GridCell:
    coordinates = Coordinates._make(row[name] for name in Coordinates._fields)
    findings = every.get(coordinates, ())
    kinds: dict[str, list[Result]] = {name: [] for name in ("bad", "known", "deviating", "others", "passed")}
    for finding in findings:
        kinds[_kind(finding)].append(finding)
    measured = [one for one in (*kinds["passed"], *kinds["deviating"]) if one.error_x_noise is not None]
    return GridCell(
        cell=row["cell"],
        anchor=anchor,
        coordinates=coordinates,
        outcome=row["outcome"],
        has_failed=row["has_failed"],
        seconds=None if math.isnan(row["seconds"]) else row["seconds"],
        bad=tuple(in_reading_order(kinds["bad"])),
        known=tuple(kinds["known"]),
        deviating=tuple(kinds["deviating"]),
        others=tuple(kinds["others"]),
        passed=tuple(finding.check for finding in kinds["passed"]),
        worst=max(measured, key=lambda one: one.error_x_noise or 0.0, default=None),
        reproduce=next((finding.reproduce for finding in findings if finding.reproduce), ""),
    )


def _kind(finding: Result) -> str:
    if is_wrong(finding):
        return "bad"
    if finding.is_known:
        return "known"
    named = {Outcome.PASSED: "passed", Outcome.DEVIATES: "deviating"}
    return named.get(finding.outcome, "others")


def _anchors(cells: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    anchors = []
    for cell in cells:
        anchor = f"cell-{re.sub(r'[^0-9A-Za-z.-]+', '_', cell)[:150]}"
        seen[anchor] = seen.get(anchor, 0) + 1
        anchors.append(anchor if seen[anchor] == 1 else f"{anchor}~{seen[anchor]}")
    return anchors
