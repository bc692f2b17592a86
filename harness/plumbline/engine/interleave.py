"""Measures two trainers in alternating rounds on one machine."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plumbline.benchmark.launch_metrics import SamplesError
from plumbline.benchmark.measurements import measurements
from plumbline.benchmark.timed_launch import LaunchSample, TimedLaunch, TimedLaunchError, interleaved
from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, PlanError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.machine.lease import exclusive_lease
from plumbline.planning.declaration import Declaration, subject_code
from plumbline.planning.devices import DEFAULT_GPUS, resolve_accelerator
from plumbline.planning.plan import Matrix, check_devices, check_ranks, plan
from plumbline.report.comparison.compare import IN_TURNS
from plumbline.report.formats import write_report
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import PERFORMANCE as CHECK
from plumbline.results.records import Measurement, Result
from plumbline.results.run import Run, read_run
from plumbline.results.run_writer import RunWriter
from plumbline.statistics.intervals import FEWEST_LAUNCHES
from plumbline.subjects.load import parse_subject
from plumbline.workloads import PERFORMANCE


@dataclass(frozen=True)
class Side:
    """One of the two trainers."""

    locator: str
    python: str | None
    declared: tuple[Declaration, ...]

    @classmethod
    def of(cls, text: str) -> Side:
        """Load the declarations of a trainer.

        It raises ``PlumblineError`` if there is no trainer or more than one, or if it cannot be loaded.
        """
        locator, python = parse_subject(text)
        with closing(Pool(locator, python)) as pool:
            declared = tuple(Declaration.of(text, values) for values in pool.subjects)
        names = list(dict.fromkeys(one.name for one in declared))
        if len(names) > 1:
            raise PlanError(f"{text} has several trainers: choose one, for example {locator}::{names[0]}")
        return cls(locator, python, declared)

    def pool(self) -> Pool:
        return Pool(self.locator, self.python)


def matrix_of(options: Any) -> Matrix:
    accelerator, present = resolve_accelerator(options.accelerator)
    if options.launches < FEWEST_LAUNCHES:
        raise PlanError(
            f"--launches {options.launches}: at least {FEWEST_LAUNCHES} launches are needed to show their spread"
        )
    matrix = Matrix(
        gpus=options.gpus or (present or DEFAULT_GPUS),
        backends=options.backends,
        precisions=options.precisions,
        workloads=options.workloads,
        accelerator=accelerator,
    )
    check_ranks(matrix)
    check_devices(matrix, present, oversubscribe=False)
    return matrix


def cells_of_both(matrix: Matrix, sides: Sequence[Side]) -> list[tuple[Cell, Cell]]:
    """Return the measured cells that both trainers support, in pairs.

    It raises ``PlanError`` if there are none.
    """
    a, b = ({_place(one.cell): one for one in plan(matrix, side.declared, PERFORMANCE)} for side in sides)
    both = [
        (one.cell, b[place].cell) for place, one in a.items() if place in b and not (one.refusal or b[place].refusal)
    ]
    if not both:
        refusal = next(
            (one.refusal for one in (*a.values(), *b.values()) if one.refusal), "no cell matches these options"
        )
        raise PlanError(f"the trainers have no measured cell in common: {refusal}")
    return both


def _place(cell: Cell) -> tuple[object, ...]:
    return cell.workload, cell.backend, cell.topology, cell.precision


def interleave(options: Any, tell: Callable[[str], None]) -> tuple[Run, Run]:
    """Measure both trainers of ``options`` and return their runs, whose headers share a random id.

    It raises ``PlumblineError`` if cells cannot be planned, a trainer cannot be loaded, or runs cannot be written.
    """
    matrix = matrix_of(options)
    plan(matrix, [])  # reports a misspelt name before anything is loaded
    sides = [Side.of(text) for text in (options.a, options.b)]
    pairs = cells_of_both(matrix, sides)
    report_dir = Path(options.report_dir or "reports")
    header = partial(
        Header.of,
        (),
        command=sys.argv,
        options={IN_TURNS: secrets.token_hex(8), "launches": options.launches},
        fingerprint=take_fingerprint(matrix.accelerator),
        simulated=matrix.accelerator == "cpu",
    )
    with ExitStack() as stack:
        writers = []
        for side, cells in zip(sides, zip(*pairs, strict=True), strict=True):
            software = {one.name: one.software for one in side.declared}
            begun = header(measured=cells, subjects=software, code=subject_code(side.declared))
            writers.append(stack.enter_context(RunWriter(report_dir, begun)))
        results: list[list[Result]] = [[] for _ in writers]
        for number, cells in enumerate(pairs, start=1):
            tell(
                f"{' '.join(map(str, _place(cells[0])))}, {number} of {len(pairs)}: {options.launches} launches of each"
            )
            for writer, found, ends in zip(writers, measured(cells, sides, options.launches), results, strict=True):
                writer.write(*found)
                ends += [record for record in found if isinstance(record, Result)]
        for writer, ends in zip(writers, results, strict=True):
            writer.close(Footer.of(ends, 0))
    for writer in writers:
        write_report(writer.path)
    a, b = (read_run(writer.path) for writer in writers)
    return a, b


class SideError(Exception):
    """The launch of one side failed."""

    def __init__(self, place: int, finding: Finding) -> None:
        super().__init__(finding.message)
        self.place = place
        self.finding = finding


def measured(cells: Sequence[Cell], sides: Sequence[Side], number: int) -> list[list[Measurement | Result]]:
    """Launch both cells ``number`` times and return their records. If one fails, the other counts as skipped."""
    launches: list[list[LaunchSample]] = [[], []]
    try:
        for done in range(number):
            # Start new interpreters for each launch, because they differ, for example in their memory layout.
            with _folder() as folder, closing(sides[0].pool()) as a, closing(sides[1].pool()) as b, exclusive_lease():
                for place, launch in _launched((a, b), cells, folder, backwards=done % 2 == 1):
                    launches[place].append(launch)
    except SideError as failed:
        findings = [Finding(CHECK, Outcome.SKIPPED, "the other trainer failed in this cell") for _ in cells]
        findings[failed.place] = failed.finding
        return [[Result.of(cell, finding, _reproduce(), None)] for cell, finding in zip(cells, findings, strict=True)]
    return [_records(cell, done) for cell, done in zip(cells, launches, strict=True)]


def _records(cell: Cell, launches: Sequence[LaunchSample]) -> list[Measurement | Result]:
    try:
        return list(measurements(cell, launches, _reproduce()))
    except SamplesError as error:
        return [Result.of(cell, Finding(CHECK, Outcome.ERRORED, str(error)), _reproduce(), None)]


def _reproduce() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _folder() -> AbstractContextManager[str]:
    return TemporaryDirectory(prefix="plumbline-")


def _launched(
    pools: Sequence[Pool], cells: Sequence[Cell], folder: str, *, backwards: bool
) -> Iterator[tuple[int, LaunchSample]]:
    turns: list[_Turn] = []
    try:
        for place in (1, 0) if backwards else (0, 1):
            own = Path(folder, str(place))
            own.mkdir()
            begin = partial(TimedLaunch.begin, pools[place], cells[place], own, Settings())
            turns.append(_Turn(place, _of(place, begin)))
        interleaved(turns, PERFORMANCE[cells[0].workload].rounds)
        for turn in turns:
            yield turn.place, LaunchSample(turn.end())
    finally:
        for turn in turns:
            turn.group.close()


@dataclass(frozen=True)
class _Turn:
    """A launch whose errors name its side."""

    place: int
    group: TimedLaunch

    def round(self) -> None:
        _of(self.place, self.group.round)

    def end(self) -> Any:
        _of(self.place, self.group.profile)
        return _of(self.place, self.group.end)


def _of(place: int, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except TimedLaunchError as failed:
        raise SideError(place, failed.finding) from failed
    except LaunchError as error:
        raise SideError(place, Finding(CHECK, Outcome.ERRORED, str(error))) from error
