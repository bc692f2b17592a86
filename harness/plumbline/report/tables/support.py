"""The support table: what a user would type, and whether this run shows that it works. Trainers side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Final, cast

import pandas as pd

from plumbline.core.backend import BACKENDS, columns
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.report.tables.cells import (
    NOT_TRIED,
    cell_table,
    mark_and_share,
    mark_of,
    passed_of_tried,
    undeclared_kinds,
    unsupported,
)
from plumbline.report.tables.run_summary import backend_in_words, devices
from plumbline.results.records import KNOWN
from plumbline.results.run import Run

REFERENCE: Final = "reference"  # the subject whose configurations are written as the old documentation wrote them
ROW_COLUMNS: Final = ("Backend", "Nodes × gpus", "Precision")
FACT_COLUMNS: Final = ("Command", "Cells passed", "Deviates", "Worst × noise", "Devices")

MARKS: Final = {
    "Y": "every cell of the row passed",
    "C": "contract: differs from one device, and matches exactly what the backend specifies",
    "K": "known: only expected failures, whose reasons are listed below",
    "N": "at least one check failed unexpectedly",
    "X": "unexpected pass: an expected failure did not occur, so the list of expected failures is out of date",
    "?": "nothing failed, but at least one cell has no verdict "
    "(it raised an error, crashed, timed out, was skipped, or is missing)",
    "-": "the subject does not declare this configuration",
}

IN_A_WORD: Final = {
    "Y": "passed",
    "C": "matches the contract",
    "K": "failed as expected",
    "N": "failed",
    "X": "unexpected pass",
    "?": "no verdict",
    "-": "unsupported",
}

_PRECISION_ORDER = ("32", "16", "bf16", "bf16-true", "bf16-master", "64")


def mark_columns() -> tuple[str, ...]:
    """Return the columns that describe configurations and hold their marks. Some are declared by backends."""
    return ("1 GPU", "1+ GPUs", *columns(), "Nodes", "16-bit")


def support_columns() -> tuple[str, ...]:
    return (*mark_columns(), *FACT_COLUMNS)


def rare_columns() -> tuple[str, ...]:
    """Return the columns that appear only if a row needs them, because few trainers have these backends."""
    return tuple(column for column, rare in columns().items() if rare)


@dataclass(frozen=True)
class Configuration:
    """What a user would type, without the numbers of gpus and nodes: a row of the table. Every cell belongs to one."""

    subject: str
    backend: str
    several_devices: bool
    several_nodes: bool
    precision: str
    accelerator: str

    def described_by(self) -> set[str]:
        backend, precision = BACKENDS.get(self.backend), PRECISIONS.get(self.precision)
        described = {"1+ GPUs" if self.several_devices else "1 GPU"}
        if backend and backend.column:
            described.add(backend.column)
        if self.several_nodes:
            described.add("Nodes")
        if precision and precision.is_16_bit:
            described.add("16-bit")
        return described

    def command(self, gpus: set[int], nodes: set[int]) -> str:
        if self.subject != REFERENCE:
            words = [] if self.backend == "none" else [self.backend]
            words.append(_how_many(gpus, "k", "gpu"))
            words += [_how_many(nodes, "n", "node")] if self.several_nodes else []
            return f"{self.subject}: {', '.join([*words, self.precision])}"
        arguments = ["gpus=k" if self.several_devices else "gpus=1"]
        arguments += ["num_nodes=n"] if self.several_nodes else []
        backend = BACKENDS.get(self.backend)
        if backend is None or (backend.dimensions and not backend.chosen_by_trainer):
            arguments.append(f"distributed_backend={self.backend!r}")
        if self.precision == "16":
            arguments.append("use_amp=True")
        elif self.precision != "32":
            arguments.append(f"precision={self.precision if self.precision.isdecimal() else repr(self.precision)}")
        return f"Trainer({', '.join(arguments)})"

    @property
    def reading_order(self) -> tuple[int, str, bool, bool, int, str, str]:
        backends = list(BACKENDS)
        return (
            backends.index(self.backend) if self.backend in backends else len(backends),
            self.backend,
            self.several_devices,
            self.several_nodes,
            _PRECISION_ORDER.index(self.precision) if self.precision in _PRECISION_ORDER else len(_PRECISION_ORDER),
            self.precision,
            self.accelerator,
        )


def _how_many(numbers: set[int], letter: str, noun: str) -> str:
    shown = str(*numbers) if len(numbers) == 1 else letter
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def support_table(run: Run, *, every: bool = False) -> pd.DataFrame:
    """Return one row per configuration; columns are ``support_columns``, without the rare ones that no row needs.

    Configurations without a declared cell share their subject's last row; with ``every``, each has its own row.

    The columns that apply to the row's configuration hold its mark, the others are empty.
    ``Cells passed`` is ``passed/tried``, with the numbers of cells that failed as expected or were not tried.
    ``Worst × noise`` is the largest error in multiples of rounding noise, NaN if nothing was measured.
    """
    rows: list[dict[str, str | int | float]] = []
    needed: set[str] = set()
    for _, own in cell_table(run).groupby("subject", sort=False):
        groups = _configurations(own)
        declared = {one: cells for one, cells in groups.items() if every or mark_of(cells) != "-"}
        rows += [
            _row(run, one, cells, one.described_by(), one.command(set(cells["gpus"]), set(cells["num_nodes"])))
            for one, cells in declared.items()
        ]
        rows += _undeclared(run, {one: cells for one, cells in groups.items() if one not in declared}, declared)
        needed |= _described(groups)
    names = [name for name in support_columns() if name in needed or name not in rare_columns()]
    table: pd.DataFrame = pd.DataFrame(rows, columns=names)
    return table


def side_by_side(run: Run, *, every: bool = False) -> pd.DataFrame | None:
    """Return a table with ``ROW_COLUMNS`` and a column for each subject, None if the run has only one subject.

    An entry is the mark of the subject's cells with ``right/tried`` (see ``right_of_tried``); it is empty if the run
    has no such cell of the subject. Rows of which no subject declares a cell are left out, unless ``every``.
    """
    cells = cell_table(run)
    if cells["subject"].nunique() < 2:
        return None
    entries = [
        (backend_in_words(one.backend), place, one.precision, one.subject, mark_and_share(own))
        for one, own in _configurations(cells).items()
        for place in ["n×k" if one.several_nodes else "1×k" if one.several_devices else "1×1"]
    ]
    long = pd.DataFrame(entries, columns=[*ROW_COLUMNS, "subject", "entry"])
    # A subject with cells on two accelerators has two entries for a row, and the last one is shown.
    long = long.drop_duplicates([*ROW_COLUMNS, "subject"], keep="last")
    wide = long.pivot(index=list(ROW_COLUMNS), columns="subject", values="entry").fillna("")
    rows = pd.MultiIndex.from_frame(long[list(ROW_COLUMNS)].drop_duplicates())
    wide = wide.reindex(index=rows, columns=list(cells["subject"].unique()))
    if not every:
        wide = wide[~_is_undeclared(wide)]
    table: pd.DataFrame = wide.rename_axis(columns=None).reset_index()
    return table


def undeclared_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the ``ROW_COLUMNS`` of the rows that ``side_by_side`` leaves out because no subject declares a cell."""
    table = side_by_side(run, every=True)
    if table is None:
        return []
    wide = table.set_index(list(ROW_COLUMNS))
    return [tuple(map(str, row)) for row in wide.index[_is_undeclared(wide)]]


def _is_undeclared(wide: pd.DataFrame) -> pd.Series[bool]:
    undeclared: pd.Series[bool] = wide.isin(["-", ""]).all(axis=1) & (wide == "-").any(axis=1)
    return undeclared


def _configurations(cells: pd.DataFrame) -> dict[Configuration, pd.DataFrame]:
    several_nodes = cells["num_nodes"] > 1
    cells = cells.assign(several_nodes=several_nodes, several_devices=several_nodes | (cells["gpus"] > 1))
    groups = {
        Configuration(*cast("tuple[str, str, bool, bool, str, str]", key)): own
        for key, own in cells.groupby([field.name for field in fields(Configuration)], sort=False)
    }
    return dict(sorted(groups.items(), key=lambda group: group[0].reading_order))


def _described(configurations: Iterable[Configuration]) -> set[str]:
    return {name for one in configurations for name in one.described_by()}


def _row(
    run: Run, one: Configuration, cells: pd.DataFrame, marked: set[str], command: str
) -> dict[str, str | int | float]:
    passed, tried = passed_of_tried(cells)
    counts = cells["outcome"].value_counts()
    others = ", ".join(f"{counts[name]} {name}" for name in (KNOWN, *NOT_TRIED) if name in counts)
    return {
        **{column: mark_of(cells) if column in marked else "" for column in mark_columns()},
        "Command": command,
        "Cells passed": f"{passed}/{tried}" + (f" ({others})" if others else ""),
        "Deviates": int((cells["outcome"] == Outcome.DEVIATES.value).sum()),
        "Worst × noise": float(cells["error_x_noise"].max()),
        "Devices": devices(run, one.accelerator),
    }


def _undeclared(
    run: Run, groups: dict[Configuration, pd.DataFrame], declared: Iterable[Configuration]
) -> Iterator[dict[str, str | int | float]]:
    for accelerator in dict.fromkeys(one.accelerator for one in groups):
        own = {one: cells for one, cells in groups.items() if one.accelerator == accelerator}
        first, cells = next(iter(own)), pd.concat(own.values())
        kinds = undeclared_kinds(unsupported(run, cells))
        command = f"{first.subject}: not declared" + (f": {kinds}" if kinds else "")
        yield _row(run, first, cells, _described(own) - _described(declared), command)
