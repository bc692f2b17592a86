"""The run on disk during a session."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from plumbline.benchmark.measurements import scaling
from plumbline.core.cell import Cell
from plumbline.core.invocation import command as command_line
from plumbline.core.software import Software
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.planning.options import Options
from plumbline.pytest_plugin.resumed_run import check_unchanged, find_resumed_run
from plumbline.pytest_plugin.xdist_transport import payload_of
from plumbline.report.formats import write_report
from plumbline.results.files import ResultsError
from plumbline.results.header_footer import Footer, Header, SubjectCode
from plumbline.results.records import Coordinates, Measurement, PlannedCell, Result, SourceLine
from plumbline.results.run import PROFILES
from plumbline.results.run_writer import RunWriter
from plumbline.worker.scratch import RUN, Scratch


class RunRecording:
    """Writes a session's run, as a pytest plugin.

    Under xdist, only the controller writes. A worker keeps its traces in a folder of its own until the controller has
    moved them.

    Raises:
        ResultsError: the run to resume cannot be read, or was begun with other options or on another machine.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._writer: RunWriter | None = None
        self._results: list[Result] = []
        self._measurements: list[Measurement] = []
        self._undeclared: dict[Coordinates, Result] = {}
        self._command: list[str] = []
        self._own: Scratch | None = None
        self._scratch: dict[Path, Scratch] = {}
        self._resumed = find_resumed_run(options)
        self._known = self._resumed.whole if self._resumed else {}

    @property
    def path(self) -> Path | None:
        """The run's folder, None before it is begun."""
        return None if self._writer is None else self._writer.path

    @property
    def resume_command(self) -> str:
        resume = [] if self._options.resume is not None else ["--resume"]
        return command_line(*self._command, *resume)

    @property
    def resumes(self) -> bool:
        return self._resumed is not None

    @property
    def undeclared(self) -> Sequence[Result]:
        """The records of cells that their subjects do not declare."""
        return tuple(self._undeclared.values())

    def known(self, cell: Cell) -> Sequence[Result] | None:
        """Return the resumed run's results of a cell, None if it has none."""
        return self._known.get(PlannedCell.of(cell).coordinates)

    def begin(
        self,
        examined: Sequence[Cell],
        measured: Sequence[Cell],
        command: list[str],
        subjects: Mapping[str, Software],
        sources: Mapping[str, SourceLine],
        code: Mapping[str, SubjectCode],
        behaviors: Mapping[Cell, TrainingBehavior],
    ) -> None:
        """Open the run for these cells.

        Args:
            examined: the cells that are trained and judged.
            measured: the cells that are timed.
            command: the user's command.
            subjects: the software of each subject.
            sources: where the function of each subject begins.
            code: the version of each subject's source.
            behaviors: the behavior that each cell's subject declares.

        Raises:
            PlanError: the resumed run does not plan one of the cells.
            NothingToResume: a subject, its library or its declarations have changed.
            ResultsError: the run cannot be written.
        """
        self._command = command
        if self._resumed is not None:
            check_unchanged(self._resumed, {cell.id for cell in (*examined, *measured)}, subjects, code, behaviors)
            self._writer, run = RunWriter.resume(self._resumed.path)
            self._results, self._measurements = list(run.results), list(run.measurements)
            return
        accelerator = self._options.matrix.accelerator
        header = Header.of(
            examined,
            measured=measured,
            command=command,
            options=self._options.recorded,
            fingerprint=take_fingerprint(accelerator),
            simulated=accelerator == "cpu",
            subjects=subjects,
            sources=sources,
            code=code,
            behaviors=behaviors,
            workloads=self._options.workload_sources,
        )
        self._writer = RunWriter(self._options.report_dir, header)

    def add_undeclared(self, results: Iterable[Result]) -> None:
        self._undeclared = {result.coordinates: result for result in results}

    def new_folder(self) -> Path:
        """Return an empty folder for the trace of a launch."""
        if self._own is None:
            # Ranks on other machines must write their traces where this process can read them.
            on_other_machines = self._options.launcher.nodes is not None
            self._own = Scratch.new(RUN, self._options.report_dir.resolve() if on_other_machines else None)
            self._scratch[Path(self._own.path)] = self._own
        return Path(tempfile.mkdtemp(prefix="cell-", dir=self._own.path))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        payload = payload_of(report)
        if payload is None or self._writer is None:
            return
        self._results += payload.results
        self._measurements += payload.measurements
        with _exit_on_write_error():
            self._writer.write(*payload.measurements, *payload.results)
            if payload.evidence is not None:
                self._keep_trace(payload.evidence, payload.results, self._writer.path)
            if payload.profile is not None:
                self._move(payload.profile, self._writer.path / PROFILES / payload.results[0].cell)

    def _keep_trace(self, folder: Path, results: Sequence[Result], run: Path) -> None:
        # Expected failures too: a later judge may judge them differently.
        wanted = any(result.outcome.is_bad or result.expected for result in results)
        if wanted or self._options.keep_traces:
            self._move(folder, run / "traces" / results[0].cell)
        else:
            self._take_over(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _move(self, folder: Path, kept: Path) -> None:
        self._take_over(folder)
        if folder.is_dir():
            shutil.rmtree(kept, ignore_errors=True)  # from before the run was resumed
            shutil.move(folder, kept)

    def _take_over(self, folder: Path) -> None:
        # An xdist worker may end before this process, so this process keeps its folder.
        if folder.parent not in self._scratch and folder.is_dir():
            self._scratch[folder.parent] = Scratch(folder.parent)

    def finish(self, exitstatus: int) -> None:
        for scratch in self._scratch.values():
            # An xdist worker leaves its folder to the controller.
            scratch.leave(remove=self._writer is not None)
        self._scratch.clear()
        if self._writer is None:
            return
        with _exit_on_write_error():
            if exitstatus != pytest.ExitCode.INTERRUPTED:
                unwritten = [result for result in self.undeclared if result.coordinates not in self._known]
                self._results += unwritten
                self._writer.write(*unwritten, *scaling(self._measurements))
                self._writer.close(Footer.of(self._results, int(exitstatus)))
            write_report(self._writer.path)


@contextmanager
def _exit_on_write_error() -> Iterator[None]:
    """End the session as an interruption does if the run cannot be written."""
    try:
        yield
    except (ResultsError, OSError) as error:
        message = f"{error} Use --resume to continue."
        pytest.exit(message, returncode=int(pytest.ExitCode.INTERRUPTED))
