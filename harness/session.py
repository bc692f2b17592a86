"""One pytest session that examines cells: its plan, its pools, its run on disk, its table at the end.

An object of this class is a pytest plugin of its own, registered at the first cell. Under xdist each worker has one
that trains and judges; the controller's, which alone has begun a run, writes down what reaches it with the reports.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from harness.benchmark_test import BenchmarkTest
from harness.cell_test import OUTCOME, PROPERTY, CellTest
from harness.core.cell import Cell
from harness.core.errors import LaunchError, PlanError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.sketch import SKETCH_ABOVE
from harness.expectations import FOLDER, ExpectationsError, expected, known_of, read_expectations
from harness.launch.launcher import check_nodes, find_launcher
from harness.launch.lease import Lease, share, share_now
from harness.launch.local import Launched, start
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.launch.workspace import Workspace
from harness.measure.estimate import FEWEST_LAUNCHES
from harness.measure.pools import WarmPools
from harness.measure.scaling import scaling
from harness.plan import DEFAULT_GPUS, Declaration, Matrix, Planned, check_devices, plan
from harness.report.speed import speed_for_terminal
from harness.report.terminal import support_for_terminal
from harness.report.write import write_report
from harness.store.errors import NothingToResume, StoreError
from harness.store.fingerprint import take_fingerprint
from harness.store.records import KNOWN, UNEXPECTED_PASS, Footer, Header, Measurement, PlannedCell, Result, record_of
from harness.store.run import LATEST, Run, RunWriter, read_run
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

    ``suite`` is the file whose cells are run; what is expected of them lies beside its folder.

    Raises:
        PlumblineError: the options ask for something that cannot be planned, what is expected cannot be meant, or a
            subject cannot be loaded.
    """

    def __init__(self, options: Mapping[str, Any], root: Path, suite: Path) -> None:
        import torch

        # The judge's tensors are small: more threads would only wait for each other, and for the ranks.
        torch.set_num_threads(1)
        self._options = options
        self._root = root
        self._writer: RunWriter | None = None
        self._results: list[Result] = []
        self._measurements: list[Measurement] = []
        self.settings = Settings(options["time_limit"], options["oversubscribe"], options["sketch_above"])
        self.launches: int = options["launches"]
        self._own: Workspace | None = None
        self._workspaces: dict[Path, Workspace] = {}
        self.warm = WarmPools(self._pool)
        self._next: Planned | None = None
        self._ahead: Ahead | None = None
        interpreters = {locator: parse_subject(locator) for locator in options["subject"] or ["reference"]}
        self._launcher = find_launcher(options["launcher"])
        present = torch.cuda.device_count()
        accelerator = options["accelerator"]
        if accelerator == "auto":
            accelerator = "cuda" if present else "cpu"
        self.matrix = Matrix(
            gpus=options["gpus"] or (present if accelerator == "cuda" else DEFAULT_GPUS),
            nodes=options["nodes"],
            backends=_names(options["backends"]),
            precisions=_names(options["precisions"]),
            workloads=_names(options["workloads"]),
            accelerator=accelerator,
            seed=options["seed"],
        )
        if options["gpus"] is not None and options["gpus"] < 1:
            raise PlanError(f"--gpus {options['gpus']}: at least one device is needed")
        if accelerator == "cuda" and not present:
            raise PlanError("--accelerator cuda: there is no CUDA device here; take --accelerator cpu")
        check_devices(self.matrix, present * (self._launcher.nodes or 1), oversubscribe=options["oversubscribe"])
        # A misspelt name is answered at once, not when every subject's library has been imported.
        plan(self.matrix, [])
        self._resumed = self._run_to_resume()
        self._recorded = self._resumed.whole if self._resumed else {}
        known = read_expectations(self._folder_of_expectations(suite))
        lease = share()  # to import a library is work too
        self._pools = {locator: self._launcher.pool(*where) for locator, where in interpreters.items()}
        try:
            self._declarations = [
                Declaration.of(locator, values) for locator, pool in self._pools.items() for values in pool.subjects
            ]
            self._expectations = {
                declared.name: known_of(declared.software, known.get(declared.name, ()))
                for declared in self._declarations
            }
            self.planned: list[Planned] = plan(self.matrix, self._declarations)
            largest = max((one.cell.topology.num_nodes for one in self.planned if not one.refusal), default=1)
            check_nodes(largest, self._launcher)
        except BaseException:
            self.close()
            raise
        finally:
            lease.give_back()

    def _folder_of_expectations(self, suite: Path) -> Path:
        given = self._options["expectations"]
        if given and not Path(given).is_dir():
            raise ExpectationsError(f"--expectations {given}: there is no such folder")
        return Path(given) if given else suite.parent.parent / FOLDER

    @cached_property
    def _locators(self) -> dict[str, str]:
        return {declared.name: declared.locator for declared in self._declarations}

    def test(self, planned: Planned, item: pytest.Item) -> CellTest:
        """Return the test of one planned cell."""
        return CellTest(self, planned, item)

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
        lease = lease or share()
        try:
            launched = start(self.pool_of(self._locators[planned.cell.subject]), planned.cell, folder, self.settings)
        except BaseException:
            lease.give_back()
            raise
        return Ahead(planned, folder, launched, lease)

    def new_folder(self) -> Path:
        """Return an empty folder for the evidence of a launch; it is removed with the run."""
        # What ranks on other machines write must lie where this process sees it.
        place = None if self._launcher.nodes is None else self._report_dir.resolve()
        if self._own is None:
            self._own = Workspace.new(place)
            self._workspaces[self._own.path] = self._own
        return self._own.folder()

    def launch_ahead(self) -> None:
        """Begin the next test's cell: its ranks train while this process judges the last one."""
        if self._next is None or self._next.refusal is not None:
            return
        lease = share_now()
        if lease is None:
            return  # somebody measures, or waits to: so does the next test then
        try:
            self._ahead = self.launched(self._next, lease)
        except LaunchError:
            self._ahead = None  # the next test will meet it itself, and say so

    def pool_of(self, locator: str) -> Pool:
        """Return the pool of a subject's cells that are examined."""
        if not self._pools[locator].alive:
            # What killed it is said by the cell that met it; the others are not to suffer.
            self._pools[locator].close()
            self._pools[locator] = self._pool(locator)
        return self._pools[locator]

    def _pool(self, locator: str) -> Pool:
        return self._launcher.pool(*parse_subject(locator))

    def locator_of(self, subject: str) -> str:
        """Return how a subject is found, its interpreter included."""
        return self._locators[subject]

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
        return plan(self.matrix, self._declarations, PERFORMANCE)

    def benchmark(self, planned: Planned, item: pytest.Item) -> BenchmarkTest:
        """Return the test that measures a planned cell; nothing else runs meanwhile."""
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None
        return BenchmarkTest(self, planned, item)

    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> None:
        """Remember what comes next."""
        parameters = getattr(nextitem, "callspec", None)
        self._next = parameters.params.get("plumbline_cell") if parameters else None

    def begin(self, chosen: Collection[str], command: list[str]) -> None:
        """Open the run on disk for the cells whose ids were ``chosen``; once is enough."""
        if self._writer is not None or not chosen:
            return
        if self._resumed is not None:
            self._go_on(self._resumed, chosen)
            return
        if not self._options["report_dir"]:
            with suppress(OSError):  # the writer says what is in the way
                self._report_dir.mkdir(exist_ok=True)
        examined = [planned.cell for planned in self.planned if planned.cell.id in chosen]
        rest = chosen - {cell.id for cell in examined}
        header = Header.of(
            examined,
            measured=[planned.cell for planned in self.to_measure if planned.cell.id in rest] if rest else (),
            command=command,
            options=self._asked,
            fingerprint=take_fingerprint(self.matrix.accelerator),
            simulated=self.matrix.accelerator == "cpu",
            subjects={declared.name: declared.software for declared in self._declarations},
        )
        self._writer = RunWriter(self._report_dir, header)

    def _go_on(self, resumed: Run, chosen: Collection[str]) -> None:
        """Open the run that broke off, for cells that it means to answer for."""
        unknown = chosen - {planned.cell for planned in resumed.header.planned}
        if unknown:
            raise PlanError(
                f"--resume: {resumed.path} was not to answer for {min(unknown)}: select what it was begun with: "
                f"{shlex.join(resumed.header.command)}"
            )
        self._writer, run = RunWriter.resume(resumed.path)
        self._results, self._measurements = list(run.results), list(run.measurements)

    @property
    def _report_dir(self) -> Path:
        given = self._options["report_dir"]
        return Path(given) if given else self._root / "reports"

    @property
    def _asked(self) -> dict[str, Any]:
        """The options that say what is examined and how; they stand in the run's header."""
        names = ("gpus", "nodes", "backends", "precisions", "workloads", "subject", "accelerator", "seed", "launcher")
        return {name: self._options[name] for name in (*names, "oversubscribe", "sketch_above", "launches")}

    def _run_to_resume(self) -> Run | None:
        """Return the run that broke off, None where a new one is to begin.

        Raises:
            NothingToResume: it was asked something else, or on another machine.
        """
        if self._options["resume"] is None:
            return None
        run = read_run(
            self._report_dir / LATEST if self._options["resume"] == LATEST else Path(self._options["resume"])
        )
        differing = [name for name, value in self._asked.items() if run.header.options.get(name, value) != value]
        if differing:
            raise NothingToResume(
                f"--resume: {run.path} was begun with other options ({', '.join(differing)}): repeat its own: "
                f"{shlex.join(run.header.command)}"
            )
        if run.header.fingerprint.key != take_fingerprint(self.matrix.accelerator).key:
            raise NothingToResume(f"--resume: {run.path} was begun on another machine, or with other software.")
        return run

    def results(self, cell: Cell, findings: Sequence[Finding], reproduce: str, seconds: float | None) -> list[Result]:
        """Return the records of a cell's findings, with what was expected of them."""
        known = expected(cell, findings, self._expectations[cell.subject])
        return [
            Result.of(cell, finding, reproduce, seconds, said, len(findings))
            for finding, said in zip(findings, known, strict=True)
        ]

    def recorded(self, cell: Cell) -> Sequence[Result] | None:
        """Return what the resumed run has of a cell, None if it is still to be examined."""
        return self._recorded.get(PlannedCell.of(cell).coordinates)

    def reproduce(self, nodeid: str) -> str:
        """Return the command that runs just this test again."""
        options = self._options
        words = ["pytest", nodeid]
        for name in ("gpus", "nodes", "seed"):
            if options[name] is not None:
                words += [f"--{name}", str(options[name])]
        for locator in options["subject"] or ():
            words += ["--subject", locator]
        if options["accelerator"] != "auto":
            words += ["--accelerator", options["accelerator"]]
        if options["launcher"] != "local":
            words += ["--launcher", options["launcher"]]
        if options["expectations"]:
            words += ["--expectations", options["expectations"]]
        if self.settings.oversubscribe:
            words.append("--oversubscribe")
        if self.launches != FEWEST_LAUNCHES:
            words += ["--launches", str(self.launches)]
        if self.settings.sketch_above != SKETCH_ABOVE:
            words += ["--sketch-above", str(self.settings.sketch_above)]
        return shlex.join(words)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a cell's findings as soon as they are here, and keep its evidence if somebody may want it."""
        found = dict(report.user_properties).get(PROPERTY)
        if report.when != "call" or found is None or self._writer is None:
            return
        values = json.loads(str(found))
        records = [record_of(line.encode()) for line in values["records"]]
        results = [record for record in records if isinstance(record, Result)]
        measurements = [record for record in records if isinstance(record, Measurement)]
        self._results += results
        self._measurements += measurements
        with _ending_in_a_sentence():
            self._writer.write(*measurements, *results)
            if values["evidence"] is None:
                return
            folder = Path(values["evidence"])
            if folder.parent not in self._workspaces and folder.is_dir():
                # An xdist worker's, who may be gone before us.
                self._workspaces[folder.parent] = Workspace(folder.parent)
            # What was expected to be bad, and may be judged better one day, is evidence too.
            wanted = any(result.outcome.is_bad or result.expected for result in results)
            if wanted or self._options["keep_traces"]:
                if folder.is_dir():
                    kept = self._writer.path / "traces" / results[0].cell
                    shutil.rmtree(kept, ignore_errors=True)  # from before the run was resumed
                    shutil.move(folder, kept)
            else:
                shutil.rmtree(folder, ignore_errors=True)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show how a cell ended, not only whether."""
        return _STATUS.get(str(dict(report.user_properties).get(OUTCOME))) if report.when == "call" else None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End every pool; close the run, unless somebody interrupted it, and write its tables."""
        self.close()
        for workspace in self._workspaces.values():
            # An xdist worker has no writer: what it leaves is still to be looked through.
            workspace.leave(remove=self._writer is not None)
        self._workspaces.clear()
        if self._writer is None:
            return
        if exitstatus != pytest.ExitCode.INTERRUPTED:
            with _ending_in_a_sentence():
                self._writer.write(*scaling(self._measurements))
                self._writer.close(Footer.of(self._results, int(exitstatus)))
        with _ending_in_a_sentence():
            write_report(self._writer.path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Close the output with the support table."""
        if self._writer is None:
            return
        width = max(100, shutil.get_terminal_size((100, 24)).columns)
        run = read_run(self._writer.path)
        tables: dict[str, Callable[..., str]] = {"support": support_for_terminal, "speed": speed_for_terminal}
        if all(cell.measured for cell in run.header.planned):
            del tables["support"]
        for title, table in tables.items():
            if lines := table(run, width=width, colour=terminalreporter.hasmarkup).rstrip("\n"):
                terminalreporter.section(title)
                terminalreporter.write_line(lines)
        terminalreporter.write_line(f"report: {self._writer.path / 'report.html'}")

    def close(self) -> None:
        """End every pool."""
        self.warm.close()
        for pool in self._pools.values():
            pool.close()
        if self._ahead is not None:
            shutil.rmtree(self._ahead.folder, ignore_errors=True)
            self._ahead.lease.give_back()
            self._ahead = None


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


def _names(given: str | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(name.strip() for name in given.split(",") if name.strip())


@contextmanager
def _ending_in_a_sentence() -> Iterator[None]:
    """End the session, as if somebody had interrupted it, where what it found cannot be written."""
    try:
        yield
    except (StoreError, OSError) as error:
        told = f"{error} What is there can be gone on with: --resume."
        pytest.exit(told, returncode=int(pytest.ExitCode.INTERRUPTED))
