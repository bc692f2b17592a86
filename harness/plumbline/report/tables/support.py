"""The support table: what a user would type, and whether this run shows that it works; trainers side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import pandas as pd

from plumbline.core.backend import BACKENDS, columns
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.report.tables.cells import DECLINED, MISSING, cell_table, undeclared_kinds, unsupported
from plumbline.report.tables.run_summary import backend_in_words, devices
from plumbline.results.records import KNOWN, UNEXPECTED_PASS
from plumbline.results.run import Run

REFERENCE: Final = "reference"
"""The subject whose configurations are written as the old documentation wrote them."""

ROW_COLUMNS: Final = ("Backend", "Nodes × gpus", "Precision")
FACT_COLUMNS: Final = ("Command", "Cells passed", "Deviates", "Worst × noise", "Devices")

MARKS: Final = {
    "Y": "every cell behind the row passed",
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

NOT_TRIED: Final = (*DECLINED, MISSING)
_PRECISION_ORDER = ("32", "16", "bf16", "64")


def mark_columns() -> tuple[str, ...]:
    """Return the columns that describe configurations and hold their marks; backends bring theirs."""
    return ("1 GPU", "1+ GPUs", *columns(), "Nodes", "16-bit")


def support_columns() -> tuple[str, ...]:
    return (*mark_columns(), *FACT_COLUMNS)


def rare_columns() -> tuple[str, ...]:
    """Return the columns that are there only where a row has a mark for them: few trainers have these backends."""
    return tuple(column for column, rare in columns().items() if rare)


@dataclass(frozen=True)
class Configuration:
    """What a user would type, with the numbers of gpus and nodes left open: a row of the table.

    Every cell has exactly one configuration, also with an unknown backend or precision.
    """

    subject: str
    backend: str
    several_devices: bool
    several_nodes: bool
    precision: str
    accelerator: str

    def described_by(self) -> set[str]:
        """Return the columns that describe the configuration; bfloat16 is a 16-bit format too."""
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
        """Return what to type, given the numbers of ``gpus`` per node and of ``nodes`` of the cells."""
        return self._trainer_call() if self.subject == REFERENCE else self._in_words(gpus, nodes)

    def _trainer_call(self) -> str:
        arguments = ["gpus=k" if self.several_devices else "gpus=1"]
        if self.several_nodes:
            arguments.append("num_nodes=n")
        backend = BACKENDS.get(self.backend)
        if backend is None or (backend.dimensions and not backend.chosen_by_trainer):
            arguments.append(f"distributed_backend={self.backend!r}")
        if self.precision == "16":
            arguments.append("use_amp=True")
        elif self.precision != "32":
            shown = self.precision if self.precision.isdecimal() else repr(self.precision)
            arguments.append(f"precision={shown}")
        return f"Trainer({', '.join(arguments)})"

    def _in_words(self, gpus: set[int], nodes: set[int]) -> str:
        words = [_how_many(gpus, "k", "gpu")]
        if self.backend != "none":
            words.insert(0, self.backend)
        if self.several_nodes:
            words.append(_how_many(nodes, "n", "node"))
        return f"{self.subject}: {', '.join([*words, self.precision])}"


def _how_many(numbers: set[int], letter: str, noun: str) -> str:
    """Return ``4 gpus`` where all cells have 4, else ``k gpus``."""
    shown = str(*numbers) if len(numbers) == 1 else letter
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def mark(outcomes: Iterable[str], *, has_failed: bool = False) -> str:
    """Return the mark for cells with these outcomes; ``MARKS`` explains each.

    Unsupported cells do not count, unless there are no others.
    ``has_failed``: a check failed unexpectedly in a cell whose own outcome is a worse one.
    """
    judged = {outcome for outcome in outcomes if outcome != Outcome.UNSUPPORTED.value}
    if has_failed or Outcome.FAILED.value in judged:
        return "N"
    if not judged:
        return "-"
    if UNEXPECTED_PASS in judged:
        return "X"
    if not judged <= {Outcome.PASSED.value, Outcome.DEVIATES.value, KNOWN}:
        return "?"
    if KNOWN in judged:
        return "K"
    return "C" if Outcome.DEVIATES.value in judged else "Y"


def support_table(run: Run, *, every: bool = False) -> pd.DataFrame:
    """Return one row a configuration; columns are ``support_columns``, less the rare ones that no row needs.

    Configurations of which a subject declares no cell share its last row; with ``every``, each has a row of its own.

    The columns that apply to the row's configuration hold its mark, the others are empty.
    ``Cells passed`` is ``passed/tried``, with the numbers of cells that failed as expected or were not tried.
    ``Worst × noise`` is the largest error in multiples of rounding noise, NaN where nothing was measured.
    """
    groups = configurations(cell_table(run))
    rows = []
    for subject in dict.fromkeys(one.subject for one in groups):
        own = sorted((one for one in groups if one.subject == subject), key=reading_order)
        undeclared = [] if every else [one for one in own if is_undeclared(groups[one])]
        declared = [one for one in own if one not in undeclared]
        rows += [_row(run, one, groups[one]) for one in declared]
        for accelerator in dict.fromkeys(one.accelerator for one in undeclared):
            folded = [one for one in undeclared if one.accelerator == accelerator]
            rows.append(_folded(run, folded, declared, groups))
    needed = {column for one in groups for column in one.described_by()}
    columns = [name for name in support_columns() if name in needed or name not in rare_columns()]
    table: pd.DataFrame = pd.DataFrame(rows, columns=columns)
    return table


def configurations(cells: pd.DataFrame) -> dict[Configuration, pd.DataFrame]:
    """Return the cells of each configuration, in the order of the plan."""
    several_nodes = cells["num_nodes"] > 1
    cells = cells.assign(several_nodes=several_nodes, several_devices=several_nodes | (cells["gpus"] > 1))
    return {
        Configuration(*cast("tuple[str, str, bool, bool, str, str]", key)): behind
        for key, behind in cells.groupby(list(Configuration.__dataclass_fields__), sort=False)
    }


def is_undeclared(cells: pd.DataFrame) -> bool:
    return bool((cells["outcome"] == Outcome.UNSUPPORTED.value).all())


def _folded(
    run: Run,
    undeclared: Sequence[Configuration],
    declared: Sequence[Configuration],
    groups: Mapping[Configuration, pd.DataFrame],
) -> dict[str, str | int | float]:
    described = {name for one in undeclared for name in one.described_by()}
    described -= {name for one in declared for name in one.described_by()}
    cells = pd.concat([groups[one] for one in undeclared])
    kinds = undeclared_kinds(unsupported(run, cells))
    subject = undeclared[0].subject
    return {
        **{column: "-" if column in described else "" for column in mark_columns()},
        "Command": f"{subject}: not declared: {kinds}" if kinds else f"{subject}: not declared",
        "Cells passed": _share(Counter(cells["outcome"])),
        "Deviates": 0,
        "Worst × noise": float("nan"),
        "Devices": devices(run, undeclared[0].accelerator),
    }


def _row(run: Run, configuration: Configuration, cells: pd.DataFrame) -> dict[str, str | int | float]:
    outcomes = Counter(cells["outcome"])
    shown = mark(outcomes, has_failed=bool(cells["has_failed"].any()))
    described = configuration.described_by()
    return {
        **{column: shown if column in described else "" for column in mark_columns()},
        "Command": configuration.command(set(cells["gpus"]), set(cells["num_nodes"])),
        "Cells passed": _share(outcomes),
        "Deviates": outcomes[Outcome.DEVIATES.value],
        "Worst × noise": float(cells["error_x_noise"].max()),
        "Devices": devices(run, configuration.accelerator),
    }


def passed_of_tried(outcomes: Iterable[str]) -> tuple[int, int]:
    """Return how many cells passed, and how many were trained."""
    tried = [outcome for outcome in outcomes if outcome not in NOT_TRIED]
    return tried.count(Outcome.PASSED.value), len(tried)


def _share(outcomes: Counter[str]) -> str:
    passed, tried = passed_of_tried(outcomes.elements())
    share = f"{passed}/{tried}"
    others = ", ".join(f"{outcomes[name]} {name}" for name in (KNOWN, *NOT_TRIED) if outcomes[name])
    return f"{share} ({others})" if others else share


def reading_order(configuration: Configuration) -> tuple[int, str, bool, bool, int, str, str]:
    """Return the sorting key of a subject's configurations: simple ones first, unknown names last."""
    backends, precision = list(BACKENDS), configuration.precision
    return (
        backends.index(configuration.backend) if configuration.backend in backends else len(backends),
        configuration.backend,
        configuration.several_devices,
        configuration.several_nodes,
        _PRECISION_ORDER.index(precision) if precision in _PRECISION_ORDER else len(_PRECISION_ORDER),
        precision,
        configuration.accelerator,
    )


def side_by_side(run: Run, *, every: bool = False) -> pd.DataFrame | None:
    """Return a table with ``ROW_COLUMNS`` and a column for each subject, None where the run has only one.

    An entry is the mark of the subject's cells with ``passed/tried``; empty where the run has no such cell of the
    subject. Rows of which no subject declares a cell are left out, unless ``every``.
    """
    cells = configurations(cell_table(run))
    subjects = list(dict.fromkeys(one.subject for one in cells))
    if len(subjects) < 2:
        return None
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in sorted(cells, key=reading_order):
        devices = "n×k" if one.several_nodes else "1×k" if one.several_devices else "1×1"
        row = rows.setdefault((backend_in_words(one.backend), devices, one.precision), {})
        row[one.subject] = _mark_and_share(cells[one])
    table: pd.DataFrame = pd.DataFrame(
        [
            (*named, *(row.get(subject, "") for subject in subjects))
            for named, row in rows.items()
            if every or set(row.values()) != {"-"}
        ],
        columns=[*ROW_COLUMNS, *subjects],
    )
    return table


def undeclared_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the ``ROW_COLUMNS`` of rows that ``side_by_side`` leaves out: no subject declares a cell of them."""
    table = side_by_side(run, every=True)
    rows = [] if table is None else table.values.tolist()
    names = len(ROW_COLUMNS)
    return [tuple(row[:names]) for row in rows if set(row[names:]) == {"-"}]


def _mark_and_share(cells: pd.DataFrame) -> str:
    passed, tried = passed_of_tried(cells["outcome"])
    shown = mark(cells["outcome"], has_failed=bool(cells["has_failed"].any()))
    return f"{shown} {passed}/{tried}" if tried else shown
