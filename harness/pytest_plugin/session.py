"""One pytest session that examines cells: its plan, its pools, its run on disk, its table at the end.

An object of this class is a pytest plugin of its own, registered at the first cell. Under xdist each worker has one
that trains and judges; the controller's, which alone has begun a run, writes down what reaches it with the reports.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from harness.benchmark.pools import WarmPools
from harness.core.cell import Cell
from harness.core.errors import LaunchError, PlanError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.launch.launcher import check_devices_of_nodes, check_nodes
from harness.launch.local.devices import devices_of
from harness.launch.local.launcher import Launched, start
from harness.launch.pool import Pool
from harness.launch.timeouts import Timeouts
from harness.machine.lease import Lease, share, share_now
from harness.planning.expectations import expected, known_of_subject, read_expectations
from harness.planning.options import Options
from harness.planning.plan import Declaration, Planned, plan
from harness.planning.reproduction import Reproduction
from harness.pytest_plugin.run_recording import Recording
from harness.pytest_plugin.xdist_transport import outcome_of
from harness.report.tables.cells import undeclared_in_words
from harness.report.terminal.end_of_run import speed_for_terminal, support_for_terminal
from harness.results.records import KNOWN, UNEXPECTED_PASS, Coordinates, Result
from harness.results.run import read_run
from harness.statistics.launch_estimate import FEWEST_LAUNCHES
from harness.subjects.locator import parse_subject
from harness.workloads import PERFORMANCE

_STATUS = {
    Outcome.DEVIATES.value: ("deviates", "d", "DEVIATES"),
    Outcome.UNSUPPORTED.value: ("unsupported", "u", "UNSUPPORTED"),
    Outcome.ERRORED.value: ("failed", "E", "ERRORED"),
    Outcome.CRASHED.value: ("failed", "C", "CRASHED"),
    Outcome.TIMED_OUT.value: ("failed", "T", "TIMED_OUT"),
    KNOWN: ("known", "k", "KNOWN"),
    UNEXPECTED_PASS: ("failed", "X", "UNEXPECTED PASS"),
}


class Session:
    """What this process knows of the run. ``options`` are pytest's, ``root`` its root directory.

    ``suite`` is the file whose cells are run; what is expected of them lies beside its folder. ``say`` tells the user
    something at once.

    Raises:
        PlumblineError: the options ask for something that cannot be planned, what is expected cannot be meant, or a
            subject cannot be loaded.
    """

    def __init__(self, options: Mapping[str, Any], root: Path, suite: Path, say: Callable[[str], None] = print) -> None:
        import torch

        # The judge's tensors are small: more threads would only wait for each other, and for the ranks.
        torch.set_num_threads(1)
        self._say = say
        self._options = Options(options, root, say)
        self._recording = Recording(self._options)
        self._reproduction = Reproduction(options, self._options.matrix, self._options.default_gpus)
        self.settings, self.launches = self._options.settings, self._options.launches
        self.recorded = self._recording.known
        self.new_folder = self._recording.new_folder
        self._launcher = self._options.launcher
        self.warm = WarmPools(self._pool)
        self._timeouts = Timeouts(self.settings.time_limit)
        self.reason_not_to_run = self._timeouts.reason
        self._next: Planned | None = None
        self._ahead: Ahead | None = None
        self._left_out: dict[Coordinates, Result] = {}
        known = read_expectations(self._options.expectations(suite))
        lease = share()  # to import a library is work too
        self._pools = {locator: self._launcher.pool(*where) for locator, where in self._options.interpreters.items()}
        try:
            self._declarations = [
                Declaration.of(locator, values) for locator, pool in self._pools.items() for values in pool.subjects
            ]
            self._expectations = {
                declared.name: known_of_subject(declared.name, declared.software, known)
                for declared in self._declarations
            }
            self.planned: list[Planned] = plan(self._options.matrix, self._declarations)
            cells = [one.cell for one in self.planned if not one.refusal]
            check_nodes(max((cell.topology.num_nodes for cell in cells), default=1), self._launcher)
            check_devices_of_nodes(cells, self._pools.values(), oversubscribe=self.settings.oversubscribe)
            self._check_selected()
        except BaseException:
            self.close()
            raise
        finally:
            lease.give_back()

    def _check_selected(self) -> None:
        every = [one.cell.id for one in (*self.planned, *plan(self._options.matrix, self._declarations, PERFORMANCE))]
        for name in self._options.cells or ():
            if name not in every:
                close = difflib.get_close_matches(name, every, 1)
                raise PlanError(
                    f"--cell {name}: these options plan no such cell{f'; did you mean {close[0]}?' if close else ''}"
                )

    def selected(self, planned: Sequence[Planned]) -> list[Planned]:
        """Return those of the cells that ``--cell`` names, or all."""
        wanted = self._options.cells
        return [one for one in planned if wanted is None or one.cell.id in wanted]

    def reproduce(self, planned: Planned, suite: Path) -> str:
        """Return the command that runs just this cell again; ``suite`` is the folder of the suite it is in."""
        locator = self.locator_of(planned.cell.subject)
        declared = [one for one in self._declarations if one.locator == locator]
        return self._reproduction.command(planned, declared, suite)

    @cached_property
    def to_measure(self) -> list[Planned]:
        """Every cell of the matrix that is trained for its speed.

        Raises:
            PlanError: with these options nothing can be measured.
        """
        if self._launcher.nodes is not None:
            raise PlanError("speed is measured on one machine, whose clock all ranks share: leave --launcher out")
        if self.launches < FEWEST_LAUNCHES:
            raise PlanError(f"--launches {self.launches}: fewer than {FEWEST_LAUNCHES} say nothing of their spread")
        return plan(self._options.matrix, self._declarations, PERFORMANCE)

    def begin(self, chosen: Set[str], command: list[str]) -> None:
        """Open the run on disk for the cells whose ids were ``chosen``; once is enough."""
        if not chosen or self._recording.path is not None:
            return
        if self._recording.resumes:  # what is not declared needs no answer, so no run was begun for it
            chosen = chosen - {one.cell.id for one in self.planned if one.refusal}
        examined = [planned.cell for planned in self.planned if planned.cell.id in chosen]
        rest = chosen - {cell.id for cell in examined}
        measured = [planned.cell for planned in self.to_measure if planned.cell.id in rest] if rest else []
        subjects = {declared.name: declared.software for declared in self._declarations}
        conducts = {planned.cell: planned.conduct for planned in self.planned}
        self._recording.begin(examined, measured, command, subjects, conducts)

    def leave_out(self, results: Iterable[Result]) -> None:
        """Take the records of cells that subjects do not declare, and that were not made into tests."""
        self._left_out = {result.coordinates: result for result in results}

    def results(self, cell: Cell, findings: Sequence[Finding], reproduce: str, seconds: float | None) -> list[Result]:
        """Return the records of a cell's findings, with what was expected of them; ``seconds`` is its launch's time."""
        if self._timeouts.count(cell.subject, seconds):
            self._say(str(self._timeouts.reason(cell.subject)))
        known = expected(cell, findings, self._expectations[cell.subject])
        return [
            Result.of(cell, finding, reproduce, seconds, said, len(findings))
            for finding, said in zip(findings, known, strict=True)
        ]

    def launched(self, planned: Planned, lease: Lease | None = None) -> Ahead:
        """Return the launch of a cell: the one that was begun ahead, or a new one.

        It uses the machine by ``lease``, or by one that is waited for.

        Raises:
            LaunchError: the pool's server is gone.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.planned == planned:
            return ahead
        if ahead is not None:
            ahead.drop()
        folder = self.new_folder()
        if lease is None:
            lease = share(self._devices_of(planned), together=self.settings.oversubscribe, say=self._say)
        try:
            pool = self.pool_of(self.locator_of(planned.cell.subject))
            launched = start(pool, planned.cell, folder, self.settings)
        except BaseException:
            lease.give_back()
            raise
        return Ahead(planned, folder, launched, lease)

    def launch_ahead(self) -> None:
        """Begin the next test's cell: its ranks train while this process judges the last one."""
        if self._next is None or self._next.refusal or self.reason_not_to_run(self._next.cell.subject):
            return
        lease = share_now(self._devices_of(self._next), together=self.settings.oversubscribe)
        if lease is None:
            return  # somebody measures, or waits to, or has the devices: so does the next test then
        try:
            self._ahead = self.launched(self._next, lease)
        except LaunchError:
            self._ahead = None  # the next test will meet it itself, and say so

    def drop_ahead(self) -> None:
        """Let a launch that was begun ahead end: what comes next has the machine to itself."""
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def _devices_of(self, planned: Planned) -> tuple[str, ...]:
        # Those of other machines are the job's.
        return devices_of(planned.cell, self.settings.oversubscribe) if self._launcher.nodes is None else ()

    def pool_of(self, locator: str) -> Pool:
        """Return the pool of a subject's cells that are examined."""
        if not self._pools[locator].alive:
            # What killed it is said by the cell that met it; the others are not to suffer.
            self._pools[locator].close()
            self._pools[locator] = self._pool(locator)
        return self._pools[locator]

    def _pool(self, locator: str) -> Pool:
        return self._launcher.pool(*parse_subject(locator))

    @cached_property
    def _locators(self) -> dict[str, str]:
        return {declared.name: declared.locator for declared in self._declarations}

    def locator_of(self, subject: str) -> str:
        """Return how a subject is found, its interpreter included."""
        return self._locators[subject]

    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> None:
        """Remember what comes next."""
        parameters = getattr(nextitem, "callspec", None)
        self._next = parameters.params.get("plumbline_cell") if parameters else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hand a cell's findings over to the run on disk."""
        self._recording.take(report)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show how a cell ended, not only whether."""
        return _STATUS.get(outcome_of(report) or "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End every pool, and the run on disk."""
        self.close()
        self._recording.finish(exitstatus, self._left_out.values())

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Close the output with the support table, and, where it was interrupted, with how to go on."""
        path = self._recording.path
        if path is None:
            if self._left_out:
                terminalreporter.write_line(nothing_to_run(self._left_out.values()))
            return
        columns = shutil.get_terminal_size((100, 24)).columns
        width = max(72 if terminalreporter.isatty() else 100, columns)  # a file has room for whole commands
        run = read_run(path)
        every = self._options.show_unsupported
        tables: dict[str, Callable[..., str]] = {
            "support": partial(support_for_terminal, every=every, counted=not self._left_out),
            "speed": speed_for_terminal,
        }
        if all(cell.measured for cell in run.header.planned):
            del tables["support"]
        for title, table in tables.items():
            if lines := table(run, width=width, colour=terminalreporter.hasmarkup).rstrip("\n"):
                terminalreporter.section(title)
                terminalreporter.write_line(lines)
        if self._left_out:
            terminalreporter.write_line(_left_out(self._left_out.values()))
        terminalreporter.write_line(f"report: {path / 'report.html'}")
        if exitstatus == pytest.ExitCode.INTERRUPTED and run.missing:
            done = len(run.header.planned) - len(run.missing)
            terminalreporter.write_line(f"interrupted after {done} of {len(run.header.planned)} cells; to go on:")
            terminalreporter.write_line(f"  {self._recording.to_go_on}")

    def close(self) -> None:
        """End every pool."""
        self.warm.close()
        for pool in self._pools.values():
            pool.close()
        if self._ahead is not None:
            shutil.rmtree(self._ahead.folder, ignore_errors=True)
            self._ahead.lease.give_back()
            self._ahead = None


def nothing_to_run(results: Iterable[Result]) -> str:
    """Return why there is nothing to run, where every cell that was selected is one of ``results``."""
    return f"Nothing to run: {_left_out(results)}"


def _left_out(results: Iterable[Result]) -> str:
    return f"{undeclared_in_words(results)}: --show-unsupported lists them"


@dataclass(frozen=True)
class Ahead:
    """A launch that has begun, and where its evidence will lie."""

    planned: Planned
    folder: Path
    launched: Launched
    lease: Lease

    def drop(self) -> None:
        """Let it end, and forget it."""
        with self.lease:
            self.launched.trace()
        shutil.rmtree(self.folder, ignore_errors=True)
