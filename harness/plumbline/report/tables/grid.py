"""The support grid: one table per subject, backends and precisions by topologies. Each square has its cells."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from plumbline.core.finding import in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.report.tables.cells import (
    cached_per_run,
    cell_table,
    counts_in_words,
    mark_and_share,
    mark_of,
    right_of_tried,
    undeclared_in_words,
    unsupported,
)
from plumbline.report.tables.failures import is_wrong
from plumbline.report.tables.support import Configuration
from plumbline.results.records import Coordinates, Result, by_cell
from plumbline.results.run import Run


@dataclass(frozen=True)
class GridCell:
    """One cell with its findings by kind; ``passed`` are names of checks, ``anchor`` is its address within a page.

    ``worst`` is the finding with the largest error × noise among those that passed or deviate.
    """

    cell: str
    anchor: str
    workload: str
    outcome: str
    mark: str
    seconds: float | None
    bad: tuple[Result, ...]
    known: tuple[Result, ...]
    deviating: tuple[Result, ...]
    others: tuple[Result, ...]
    passed: tuple[str, ...]
    worst: Result | None
    reproduce: str

    @property
    def error(self) -> float | None:
        wrong = [one.error_x_noise for one in (*self.bad, *self.known) if one.error_x_noise is not None]
        return max(wrong) if wrong else self.worst.error_x_noise if self.worst and not self.bad else None


@dataclass(frozen=True)
class GridSquare:
    """The cells of one backend and precision on one topology; ``right`` and ``tried`` are numbers of cells."""

    nodes: int
    gpus: int
    mark: str
    right: int
    tried: int
    counts: str
    command: str
    cells: tuple[GridCell, ...]


@dataclass(frozen=True)
class GridRow:
    """One backend in one precision; ``squares`` follow the grid's topologies, ``share`` is the mark with counts."""

    backend: str
    precision: str
    mark: str
    share: str
    squares: tuple[GridSquare | None, ...]


@dataclass(frozen=True)
class Grid:
    """All cells of one subject on one accelerator; ``undeclared`` are backends and precisions with no declared cell."""

    subject: str
    accelerator: str
    topologies: tuple[tuple[int, int], ...]
    rows: tuple[GridRow, ...]
    goes_wrong: bool
    counts: str
    undeclared: tuple[tuple[str, str, int], ...]
    undeclared_in_words: str


@cached_per_run
def anchors(run: Run) -> dict[Coordinates, str]:
    seen: dict[str, int] = {}
    found = {}
    for row in cell_table(run).to_dict("records"):
        anchor = f"cell-{re.sub(r'[^0-9A-Za-z.-]+', '_', row['cell'])[:150]}"
        seen[anchor] = seen.get(anchor, 0) + 1
        coordinates = Coordinates._make(row[name] for name in Coordinates._fields)
        found[coordinates] = anchor if seen[anchor] == 1 else f"{anchor}~{seen[anchor]}"
    return found


@cached_per_run
def grids(run: Run) -> list[Grid]:
    findings = by_cell(run.results)
    cells = cell_table(run)
    shown = pd.Series([_cell(row, anchors(run), findings) for row in cells.to_dict("records")], dtype=object)
    groups = cells.assign(shown=shown).groupby(["subject", "accelerator"], sort=False)
    return [_grid(run, str(subject), str(accelerator), own) for (subject, accelerator), own in groups]


def _grid(run: Run, subject: str, accelerator: str, cells: pd.DataFrame) -> Grid:
    declared = cells[cells["mark"] != "-"]
    places = (declared if len(declared) else cells)[["num_nodes", "gpus"]].drop_duplicates()
    topologies = sorted(places.itertuples(index=False, name=None), key=lambda one: (one[0] * one[1], one[0]))
    rows = {
        Configuration(subject, str(backend), False, False, str(precision), accelerator): own
        for (backend, precision), own in cells.groupby(["backend", "precision"], sort=False)
    }
    ordered = sorted(rows, key=lambda row: row.reading_order)
    folded = [row for row in ordered if mark_of(rows[row]) == "-"]
    undeclared = unsupported(run, cells)

    def squares(row: Configuration, own: pd.DataFrame) -> GridRow:
        found = {place: _square(row, place, some) for place, some in own.groupby(["num_nodes", "gpus"])}
        return GridRow(row.backend, row.precision, mark_of(own), mark_and_share(own), tuple(map(found.get, topologies)))

    return Grid(
        subject,
        accelerator,
        tuple(topologies),
        tuple(squares(row, rows[row]) for row in ordered if row not in folded),
        any(cell.bad for cell in cells["shown"]),
        counts_in_words(cells["outcome"]),
        tuple((row.backend, row.precision, len(rows[row])) for row in folded),
        undeclared_in_words(undeclared) if undeclared else "",
    )


def _square(configuration: Configuration, topology: Any, cells: pd.DataFrame) -> GridSquare:
    nodes, gpus = map(int, topology)
    whole = replace(configuration, several_devices=nodes * gpus > 1, several_nodes=nodes > 1)
    return GridSquare(
        nodes,
        gpus,
        mark_of(cells),
        *right_of_tried(cells),
        counts_in_words(cells["outcome"]),
        whole.command({gpus}, {nodes}),
        tuple(sorted(cells["shown"], key=lambda cell: not cell.bad)),
    )


def _cell(
    row: Mapping[Hashable, Any], anchors: Mapping[Coordinates, str], every: Mapping[Coordinates, Sequence[Result]]
) -> GridCell:
    coordinates = Coordinates._make(row[name] for name in Coordinates._fields)
    findings = every.get(coordinates, ())
    kinds: dict[str, list[Result]] = {name: [] for name in ("bad", "known", "deviating", "others", "passed")}
    for finding in findings:
        named = {Outcome.PASSED: "passed", Outcome.DEVIATES: "deviating"}.get(finding.outcome, "others")
        kinds["bad" if is_wrong(finding) else "known" if finding.is_known else named].append(finding)
    measured = [one for one in (*kinds["passed"], *kinds["deviating"]) if one.error_x_noise is not None]
    return GridCell(
        cell=row["cell"],
        anchor=anchors[coordinates],
        workload=row["workload"],
        outcome=row["outcome"],
        mark=row["mark"],
        seconds=None if math.isnan(row["seconds"]) else row["seconds"],
        bad=tuple(in_reading_order(kinds["bad"])),
        known=tuple(kinds["known"]),
        deviating=tuple(kinds["deviating"]),
        others=tuple(kinds["others"]),
        passed=tuple(finding.check for finding in kinds["passed"]),
        worst=max(measured, key=lambda one: one.error_x_noise or 0.0, default=None),
        reproduce=next((finding.reproduce for finding in findings if finding.reproduce), ""),
    )
