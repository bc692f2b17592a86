"""The options, plan, pools and records of one pytest process, which under xdist is the controller or a worker.

Cells that a subject does not declare are recorded and counted, but not run. Under xdist, every worker leaves out the
same cells and reports them to the controller when it ends.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from plumbline.core.errors import PlanError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.engine.cells_in_flight import CellsInFlight, number_of_judges
from plumbline.engine.subject_pools import SubjectPools
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.machine.lease import shared_lease
from plumbline.planning.declaration import subject_code
from plumbline.planning.expectation_files import expected, known_of_subject, read_expectations
from plumbline.planning.options import Options, Reproduction
from plumbline.planning.plan import Planned, plan
from plumbline.pytest_plugin.run_on_disk import RunOnDisk, outcome_of
from plumbline.report.tables.cells import undeclared_in_words
from plumbline.report.terminal import speed_for_terminal, support_for_terminal
from plumbline.results.header_footer import Header
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Result, SourceLine
from plumbline.results.run import read_run, record_of
from plumbline.statistics.intervals import FEWEST_LAUNCHES
from plumbline.workloads import PERFORMANCE

MOST_IN_A_ROW = 3
"""Consecutive cells at the time limit after which a subject is given up. A cell that ends in time resets the count."""

_UNDECLARED = "plumbline-undeclared"
_STATUS = {
    Outcome.DEVIATES.value: ("deviates", "d", "DEVIATES"),
    Outcome.UNSUPPORTED.value: ("unsupported", "u", "UNSUPPORTED"),
    Outcome.ERRORED.value: ("failed", "E", "ERRORED"),
    Outcome.CRASHED.value: ("failed", "C", "CRASHED"),
    Outcome.TIMED_OUT.value: ("failed", "T", "TIMED_OUT"),
    KNOWN: ("known", "k", "KNOWN"),
    UNEXPECTED_PASS: ("failed", "X", "UNEXPECTED PASS"),
}
"""pytest's category, letter and word for each outcome of a cell."""


class Timeouts:
    """Gives up a subject whose cells reach ``time_limit`` seconds repeatedly: its other cells could take hours."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._in_a_row: dict[str, int] = {}

    def count(self, subject: str, seconds: float | None) -> bool:
        """Count a cell whose launch took ``seconds``, if any; return whether the subject is given up now."""
        if seconds is None:
            return False
        late = seconds >= self._time_limit
        self._in_a_row[subject] = self._in_a_row.get(subject, 0) + 1 if late else 0
        return self._in_a_row[subject] == MOST_IN_A_ROW

    def reason(self, subject: str) -> str | None:
        """Return why no more cells of ``subject`` are run, or None."""
        if self._in_a_row.get(subject, 0) < MOST_IN_A_ROW:
            return None
        return (
            f"{subject}: {MOST_IN_A_ROW} cells in a row reached the time limit of {self._time_limit:g} s, so its other "
            "cells are not run. Fix the hang or raise --time-limit, then continue with --resume."
        )


class Session:
    """The session of this process, and its hooks: pytest's options ``given``, and the cells of the file ``suite``.

    ``notify`` shows the user a message at once. ``forks_judges``: judge in several processes, if this machine allows
    it. Options that cannot be planned, invalid expectations and subjects that cannot be loaded raise
    ``PlumblineError``.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        root: Path,
        suite: Path,
        notify: Callable[[str], None] = print,
        *,
        forks_judges: bool = False,
    ) -> None:
        import torch

        # The judge's tensors are small, and more threads would compete with the ranks.
        torch.set_num_threads(1)
        self.notify = notify
        self.upcoming: Sequence[Planned] = ()  # the cells of the next tests
        self.options = Options(given, root, notify)
        self.run_on_disk = RunOnDisk(self.options)
        self.timeouts = Timeouts(self.options.settings.time_limit)
        own = self.options.own_workloads
        self._reproduction = Reproduction(given, self.options.matrix, own)
        known = read_expectations(self.options.expectations(suite))
        settings, launcher = self.options.settings, self.options.launcher
        with shared_lease():  # importing a subject's library puts load on the machine
            self.pools = SubjectPools(launcher, self.options.interpreters, own)
            try:
                self._declarations = self.pools.declarations
                self.expectations = {
                    declared.name: known_of_subject(declared.name, declared.software, known)
                    for declared in self._declarations
                }
                self.planned: list[Planned] = plan(self.options.matrix, self._declarations)
                self.pools.check(self.planned, oversubscribe=settings.oversubscribe)
                self._check_selected()
            except BaseException:
                self.pools.close()
                raise
        self.cells_in_flight = CellsInFlight(
            self.pools,
            settings,
            self.run_on_disk.new_folder,
            notify,
            leases_devices=launcher.nodes is None,
            judges=number_of_judges() if forks_judges else 0,
        )

    def _check_selected(self) -> None:
        known = [one.cell.id for one in self.planned]
        wanted = self.options.cells or ()
        if set(wanted) <= set(known):
            return
        known += [one.cell.id for one in plan(self.options.matrix, self._declarations, PERFORMANCE)]
        for name in wanted:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise PlanError(f"--cell {name}: unknown cell; {hint}--collect-only lists the cells")

    def selected(self, planned: Sequence[Planned]) -> list[Planned]:
        wanted = self.options.cells
        return [one for one in planned if wanted is None or one.cell.id in wanted]

    def reproduce(self, planned: Planned, suite: Path) -> str:
        """Return the command that runs only this cell; ``suite`` is the folder of its suite."""
        return self._reproduction.command(planned, self.pools.locator_of(planned.cell.subject), suite)

    @cached_property
    def to_measure(self) -> list[Planned]:
        """The cells that are measured; raises ``PlanError`` if the options do not allow measuring."""
        if self.options.launcher.nodes is not None:
            raise PlanError("speed can be measured on one machine only, where ranks share a clock: remove --launcher")
        if (launches := self.options.launches) < FEWEST_LAUNCHES:
            raise PlanError(
                f"--launches {launches}: at least {FEWEST_LAUNCHES} launches are needed to show their spread"
            )
        planned = plan(self.options.matrix, self._declarations, PERFORMANCE)
        if self.options.own_workloads and not planned:
            raise PlanError(
                "your own workloads cannot be timed: remove --workload, or add built-in ones with --workloads"
            )
        return planned

    def begin(self, chosen: Set[str], command: list[str], settings: dict[str, Any]) -> None:
        """Open the run on disk for the cells with these ids. Further calls do nothing."""
        if not chosen or self.run_on_disk.path is not None:
            return
        if self.run_on_disk.resumes:  # a run does not plan undeclared cells
            chosen = chosen - {one.cell.id for one in self.planned if one.refusal}
        examined = [planned.cell for planned in self.planned if planned.cell.id in chosen]
        rest = chosen - {cell.id for cell in examined}
        places = {one.name: SourceLine.of(*one.source) for one in reversed(self._declarations) if one.source}
        behaviors = {planned.cell: planned.behavior for planned in self.planned}
        accelerator = self.options.matrix.accelerator
        header = Header.of(
            examined,
            measured=[planned.cell for planned in self.to_measure if planned.cell.id in rest] if rest else [],
            command=command,
            options=self.options.recorded | ({"settings": settings} if settings else {}),
            fingerprint=take_fingerprint(accelerator),
            simulated=accelerator == "cpu",
            subjects={declared.name: declared.software for declared in self._declarations},
            sources={name: place for name, place in places.items() if place is not None},
            code=subject_code(self._declarations),
            behaviors=behaviors,
            workloads=self.options.workload_sources,
        )
        self.run_on_disk.begin(header, behaviors)
        if self.options.resume is not None and not self.run_on_disk.resumes:
            self.notify(f"{self.options.report_dir} has no run to resume; beginning a new one")

    def results(
        self, planned: Planned, findings: Sequence[Finding], seconds: float | None, suite: Path
    ) -> list[Result]:
        """Return the records of the findings about a cell, whose launch took ``seconds``."""
        cell, reproduce = planned.cell, self.reproduce(planned, suite)
        known = expected(cell, findings, self.expectations[cell.subject])
        return [
            Result.of(cell, finding, reproduce, seconds, entry, len(findings))
            for finding, entry in zip(findings, known, strict=True)
        ]

    def declined(self, planned: Planned, suite: Path) -> list[Result]:
        """Return the record of a cell that its subject does not declare, without training."""
        return self.results(planned, (planned.declined,), None, suite)

    def deselect_undeclared(
        self, config: pytest.Config, items: list[pytest.Item], cell_of: Callable[[pytest.Item], Any]
    ) -> None:
        """Deselect the tests of cells that their subjects do not declare, unless the user named their ids."""
        named = {argument.rpartition("[")[2].removesuffix("]") for argument in config.args if "[" in argument}
        deselected = {
            item: planned
            for item in items
            if (planned := cell_of(item)) is not None and planned.refusal and planned.cell.id not in named
        }
        if not deselected:
            return
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=[*deselected])
        results = [one for item, planned in deselected.items() for one in self.declined(planned, item.path.parent)]
        self.run_on_disk.add_undeclared(results)
        if hasattr(config, "workeroutput"):
            config.workeroutput[_UNDECLARED] = [result.model_dump_json() for result in results]

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return _STATUS.get(outcome_of(report) or "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.close()
        self.run_on_disk.finish(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        write, path = terminalreporter.write_line, self.run_on_disk.path
        undeclared = self.run_on_disk.undeclared
        if path is None:
            if undeclared:
                write(nothing_to_run(undeclared))
            return
        width = max(72 if terminalreporter.isatty() else 100, shutil.get_terminal_size((100, 24)).columns)
        run = read_run(path)
        tables: dict[str, Callable[..., str]] = {"speed": speed_for_terminal}
        if not all(cell.measured for cell in run.header.planned):
            every = self.options.show_unsupported
            tables = {"support": partial(support_for_terminal, every=every, counted=not undeclared), **tables}
        for title, table in tables.items():
            if lines := table(run, width=width, colour=terminalreporter.hasmarkup).rstrip("\n"):
                terminalreporter.section(title)
                write(lines)
        if undeclared:
            write(_count(undeclared))
        write(f"report: {path / 'report.html'}")
        if exitstatus == pytest.ExitCode.INTERRUPTED and run.missing:
            done = len(run.header.planned) - len(run.missing)
            write(f"interrupted after {done} of {len(run.header.planned)} cells; resume with:")
            write(f"  {self.run_on_disk.resume_command}")

    def upcoming_cells(self) -> list[Planned]:
        """Return the cells of the next tests that have to be trained."""
        return [
            one
            for one in self.upcoming
            if not one.refusal and not self.timeouts.reason(one.cell.subject) and not self.run_on_disk.known(one.cell)
        ]

    def close(self) -> None:
        self.cells_in_flight.discard()
        self.pools.close()


def undeclared_in(output: Mapping[str, Any]) -> list[Result]:
    """Return the records of undeclared cells in the ``output`` of a worker of xdist."""
    records = [record_of(line.encode()) for line in output.get(_UNDECLARED, ())]
    return [record for record in records if isinstance(record, Result)]


def nothing_to_run(undeclared: Iterable[Result]) -> str:
    return f"Nothing to run: {_count(undeclared)}"


def _count(undeclared: Iterable[Result]) -> str:
    return f"{undeclared_in_words(undeclared)}; --show-unsupported lists them"
