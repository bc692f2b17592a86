"""Which cells of two sides are compared, and whether their figures may be: two runs, or the cells of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from plumbline.core.errors import UsageError
from plumbline.results.header_footer import Header
from plumbline.results.records import CellRecord, Coordinates, Measurement, Result, by_cell
from plumbline.results.run import Run


class NotAligned(UsageError):  # noqa: N818 - named after what is wrong
    """No cell of one side corresponds to a cell of the other."""


@dataclass(frozen=True)
class CellRecords:
    """All records of one cell in a run; ``cut_short``: it was being written when the run broke off."""

    cell: CellRecord
    results: tuple[Result, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    cut_short: bool = False


@dataclass(frozen=True)
class CellPair:
    """Two cells that are compared; None where a side has no such cell.

    ``cell`` names what they share, ``versus`` in what they differ within a run (``dp → ddp``), else it is empty.
    """

    cell: str
    versus: str
    a: CellRecords | None
    b: CellRecords | None


@dataclass(frozen=True)
class Alignment:
    """The pairs of cells to compare, in the plan's order, and notes for the reader."""

    pairs: tuple[CellPair, ...]
    notes: tuple[str, ...] = ()


DIMENSIONS: Final[Mapping[str, Callable[[CellRecord], str | int]]] = {
    "backend": lambda cell: cell.backend,
    "precision": lambda cell: cell.precision,
    "gpus": lambda cell: cell.gpus,
    "subject": lambda cell: cell.subject,
}
"""In what the cells of one run may differ to be compared."""


def cell_records(run: Run) -> dict[Coordinates, CellRecords]:
    cells: dict[Coordinates, CellRecord] = {}
    results, measurements = by_cell(run.results), by_cell(run.measurements)
    for cell in (*run.header.planned, *run.results, *run.measurements):
        cells.setdefault(cell.coordinates, cell)
    return {
        key: CellRecords(cell, tuple(results.get(key, ())), tuple(measurements.get(key, ())), key == run.cut_short)
        for key, cell in cells.items()
    }


def align_runs(a: Run, b: Run) -> Alignment:
    """Pair the cells of two runs. Subjects are matched by name, or by position where each run has only one.

    Raises:
        NotAligned: a run has no cells, or the runs have no subject in common.
    """
    sides = (list(cell_records(a).values()), list(cell_records(b).values()))
    names = [list(dict.fromkeys(one.cell.subject for one in side)) for side in sides]
    for run, found in zip((a, b), names, strict=True):
        if not found:
            raise NotAligned(f"run {run.header.run_id} has no cells: nothing to compare")
    notes: tuple[str, ...] = ()
    if len(names[0]) == len(names[1]) == 1:
        if names[0] != names[1]:
            notes = (f"Subjects are matched by position: {names[0][0]} (A), {names[1][0]} (B).",)
    elif not set(names[0]) & set(names[1]):
        raise NotAligned(
            f"the subjects of A ({', '.join(names[0])}) and of B ({', '.join(names[1])}) have no name in common: "
            "compare runs of one subject each"
        )
    several = not (len(names[0]) == len(names[1]) == 1)
    # The accelerator is left out, so that a simulated run can be compared with a real one.
    before, after = ({_place(one.cell, several): one for one in side} for side in sides)
    pairs = tuple(
        CellPair(_words(place), "", before.get(place), after.get(place)) for place in dict.fromkeys((*before, *after))
    )
    return Alignment(pairs, notes)


def align_within(run: Run, by: str) -> Alignment:
    """Pair cells of one run that differ only in ``by``, one of ``DIMENSIONS``, with the first of them.

    The first value is the first in the run's plan; of gpus it is the smallest; ``auto``, which lets the trainer choose
    a backend, comes last. Where a group of cells lacks the first value, the next one is the baseline.

    Raises:
        NotAligned: all cells have the same value, or none has a counterpart.
    """
    value_of = DIMENSIONS[by]
    groups: dict[tuple[str | None, ...], dict[str | int, CellRecords]] = {}
    labels: dict[tuple[str | None, ...], str] = {}
    cells = list(cell_records(run).values())
    several = len({one.cell.subject for one in cells}) > 1
    for one in cells:
        place = _without(one.cell, by, several)
        groups.setdefault(place, {})[value_of(one.cell)] = one
        labels[place] = _words(place)
    values = list(dict.fromkeys(value_of(one.cell) for one in cells))
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
            CellPair(labels[place], f"{present[0]} → {value}", group[present[0]], group[value]) for value in present[1:]
        ]
    if not pairs:
        raise NotAligned(f"run {run.header.run_id} has nothing to compare by {by}: no two cells differ only in it")
    notes = (f"Cells without a counterpart that differs only in {by}: {alone}.",) if alone else ()
    return Alignment(tuple(pairs), notes)


def _words(place: tuple[str | None, ...]) -> str:
    return " ".join(part for part in place if part)


def _place(cell: CellRecord, several: bool) -> tuple[str | None, ...]:
    subject = cell.subject if several else None
    return subject, cell.workload, cell.backend, cell.place, cell.precision


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


@dataclass(frozen=True)
class Difference:
    """A value that differs between the two sides."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what}: {self.a} (A), {self.b} (B)"


def machines_differ(a: Header, b: Header) -> tuple[Difference, ...]:
    """Return what makes figures of two runs incomparable: the machine, or how its devices were used.

    Outcomes are always comparable: the result of a training does not depend on the machine.
    """
    before, after = a.fingerprint.key.model_dump(), b.fingerprint.key.model_dump()
    before["devices"], after["devices"] = _devices(a), _devices(b)
    before["oversubscribe"], after["oversubscribe"] = (bool(side.options.get("oversubscribe")) for side in (a, b))
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
    """Return what makes two figures incomparable: the definition of the metric or of the workload.

    Within one run a workload has one definition; its key differs only with the number of devices.
    """
    names = ("unit", "better") if one_run else ("workload_key", "unit", "better")
    return _unequal({name: getattr(a, name) for name in names}, {name: getattr(b, name) for name in names})


def _devices(header: Header) -> str:
    return "simulated" if header.simulated else "real"


def _unequal(a: dict[str, object], b: dict[str, object]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name.replace("_", " "), _shown(a.get(name)), _shown(b.get(name)))
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name)
    )


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
