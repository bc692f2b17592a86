"""Pairs the cells of two runs, or of one run, and finds what makes their figures incomparable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pandas as pd

from plumbline.core.errors import UsageError
from plumbline.core.numbers import counted
from plumbline.results.header_footer import Header
from plumbline.results.records import CellRecord, Measurement, Result, by_cell
from plumbline.results.run import Run


@dataclass(frozen=True)
class CellRecords:
    """All records of one cell in a run. ``cut_short``: the run broke off while this cell was being written."""

    results: tuple[Result, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    cut_short: bool = False


@dataclass(frozen=True)
class CellPair:
    """Two cells to compare. Cells of one run differ in ``versus`` (``dp → ddp``). A missing cell is None."""

    cell: str
    versus: str
    a: CellRecords | None
    b: CellRecords | None


@dataclass(frozen=True)
class Alignment:
    """The pairs of cells to compare, in the plan's order, and notes for the reader."""

    pairs: tuple[CellPair, ...]
    notes: tuple[str, ...] = ()


DIMENSIONS: Final = ("backend", "precision", "gpus", "subject")
"""The dimensions by which cells of one run can be compared."""

_PLACE: Final = ("subject", "workload", "backend", "topology", "precision")
"""What two cells of two runs share. The accelerator can differ: a simulated run can be compared with a real one."""


def align_runs(a: Run, b: Run) -> Alignment:
    """Pair the cells of two runs. Subjects match by name, or by position if each run has only one.

    Raise ``UsageError`` if a run has no cells, or the runs have no subject in common.
    """
    sides = {"A": cell_records(a), "B": cell_records(b)}
    for run, cells in zip((a, b), sides.values(), strict=True):
        if cells.empty:
            raise UsageError(f"run {run.header.run_id} has no cells: nothing to compare")
    names, others = (list(cells["subject"].unique()) for cells in sides.values())
    by_position = len(names) == len(others) == 1
    if not by_position and not set(names) & set(others):
        raise UsageError(
            f"the subjects of A ({', '.join(names)}) and of B ({', '.join(others)}) have no name in common: "
            "compare runs of one subject each"
        )
    shared = list(_PLACE[1:] if by_position else _PLACE)
    pairs = []
    for place, cells in pd.concat(sides, names=["side"]).groupby(shared, sort=False):
        records = dict(zip(cells.index.get_level_values("side"), cells["records"], strict=True))
        pairs.append(CellPair(" ".join(map(str, place)), "", records.get("A"), records.get("B")))
    notes = (f"Subjects are matched by position: {names[0]} (A), {others[0]} (B).",)
    return Alignment(tuple(pairs), notes if by_position and names != others else ())


def align_within(run: Run, by: str) -> Alignment:
    """Pair cells of one run that differ only in ``by``, one of ``DIMENSIONS``, with the first of them.

    Values are ordered as in the run's plan, except that ``gpus`` are ordered by number, and the backend ``auto``, which
    lets the trainer choose one, comes last. If a group of cells lacks the first value, the next one is the baseline.
    Raise ``UsageError`` if there is no pair.
    """
    cells = cell_records(run)
    values = list(cells[by].unique())
    if len(values) < 2:
        found = f"they have {values[0]}" if values else "there are no cells"
        raise UsageError(f"run {run.header.run_id} has nothing to compare by {by}: {found}")
    values.sort(key=lambda value: value == "auto" if by == "backend" else value if by == "gpus" else 0)
    shared = ["nodes" if by == "gpus" and name == "topology" else name for name in _PLACE if name != by]
    if cells["subject"].nunique() == 1 and by != "subject":
        shared.remove("subject")
    pairs = []
    alone = 0
    for place, group in cells.groupby(shared, sort=False):
        records = group.drop_duplicates(by, keep="last").set_index(by)["records"]
        first, *others = [value for value in values if value in records.index]
        alone += not others
        pairs += [
            CellPair(" ".join(map(str, place)), f"{first} → {value}", records[first], records[value])
            for value in others
        ]
    if not pairs:
        raise UsageError(f"run {run.header.run_id} has nothing to compare by {by}: no two cells differ only in it")
    notes = (f"Cells without a counterpart that differs only in {by}: {alone}.",) if alone else ()
    return Alignment(tuple(pairs), notes)


def cell_records(run: Run) -> pd.DataFrame:
    results, measurements = by_cell(run.results), by_cell(run.measurements)
    records: tuple[CellRecord, ...] = (*run.header.planned, *run.results, *run.measurements)
    cells = {key: found[0] for key, found in by_cell(records).items()}
    rows = [
        {
            **key._asdict(),
            "topology": cell.topology,
            "nodes": counted(cell.num_nodes, "node"),
            "records": CellRecords(tuple(results.get(key, ())), tuple(measurements.get(key, ())), key == run.cut_short),
        }
        for key, cell in cells.items()
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[*_PLACE, "gpus", "nodes", "records"])
    return table


@dataclass(frozen=True)
class Difference:
    """A value that differs between the two sides."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what}: {self.a} (A), {self.b} (B)"


def machines_differ(a: Header, b: Header) -> tuple[Difference, ...]:
    """Return what makes figures of two runs incomparable: the machine, or how its devices were used."""
    before, after = a.fingerprint.key.model_dump(), b.fingerprint.key.model_dump()
    for side, found in ((a, before), (b, after)):
        found["devices"] = "simulated" if side.simulated else "real"
        found["oversubscribe"] = bool(side.options.get("oversubscribe"))
    return _unequal(before, after)


def software_differs(a: Header, b: Header) -> tuple[Difference, ...]:
    """Return other differences, which may explain a change but leave figures comparable."""
    return _unequal(_software(a), _software(b))


def _software(header: Header) -> dict[str, object]:
    machine = header.fingerprint
    # Clocks and load differ in every run, so their difference carries no information.
    found: dict[str, object] = machine.model_dump(
        exclude={"key", "environment", "packages", "clocks_and_load", "commit"}
    )
    subjects, code = header.subjects.values(), header.code.values()
    return {
        "subject": _joined(f"{one.library} {one.version}" for one in subjects if one.library),
        "subject's source": _joined(one.sha256[:12] for one in code if one.sha256),
        "subject's commit": _joined(one.commit for one in code if one.commit),
        "subject's torch": _joined(one.torch for one in subjects if one.torch),
        **{f"source of workload {name}": source.sha256[:12] for name, source in header.workloads.items()},
        "seed": header.options.get("seed"),
        **found,
        "plumbline": header.plumbline,
        "plumbline's commit": machine.commit,
        **machine.packages,
        **machine.environment,
    }


def _joined(values: Iterable[str]) -> str | None:
    return ", ".join(sorted(set(values))) or None


def definitions_differ(a: Measurement, b: Measurement, *, one_run: bool) -> tuple[Difference, ...]:
    """Return what makes two figures incomparable: definitions of the metric, or of two runs' workload, that differ."""
    names = ("unit", "better") if one_run else ("workload_key", "unit", "better")
    return _unequal({name: getattr(a, name) for name in names}, {name: getattr(b, name) for name in names})


def _unequal(a: dict[str, object], b: dict[str, object]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name.replace("_", " "), _shown(a.get(name)), _shown(b.get(name)))
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name)
    )


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
