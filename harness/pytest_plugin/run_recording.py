"""The run on disk, from the side of a session: begun or gone on with, written as findings fall, and closed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.benchmark.scaling import scaling
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.core.invocation import command as command_line
from harness.core.software import Software
from harness.core.training_behavior import TrainingBehavior
from harness.launch.workspace import Workspace
from harness.machine.fingerprint import take_fingerprint
from harness.planning.options import Options
from harness.pytest_plugin.xdist_transport import handed
from harness.report.formats import write_report
from harness.results.errors import NothingToResume, ResultsError
from harness.results.records import Footer, Header, Measurement, PlannedCell, Result
from harness.results.run import LATEST, Run, RunWriter, read_run


class Recording:
    """What a session writes down, and where evidence lies until then.

    Under xdist the controller alone begins a run. A worker has none: its evidence lies in its own workspace until the
    controller has looked through it.

    Raises:
        NothingToResume: the run to go on with was asked something else, or on another machine.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._writer: RunWriter | None = None
        self._results: list[Result] = []
        self._measurements: list[Measurement] = []
        self._command: list[str] = []
        self._own: Workspace | None = None
        self._workspaces: dict[Path, Workspace] = {}
        self._resumed = self._run_to_resume()
        self._known = self._resumed.whole if self._resumed else {}

    @property
    def path(self) -> Path | None:
        """The run's folder, None where nothing was begun."""
        return None if self._writer is None else self._writer.path

    @property
    def to_go_on(self) -> str:
        """The command that goes on with the run."""
        resume = [] if self._options.resume is not None else ["--resume"]
        return command_line(*self._command, *resume)

    @property
    def resumes(self) -> bool:
        """Whether a run is gone on with."""
        return self._resumed is not None

    def known(self, cell: Cell) -> Sequence[Result] | None:
        """Return what the resumed run has of a cell, None if it is still to be examined."""
        return self._known.get(PlannedCell.of(cell).coordinates)

    def begin(
        self,
        examined: Sequence[Cell],
        measured: Sequence[Cell],
        command: list[str],
        subjects: Mapping[str, Software],
        conducts: Mapping[Cell, TrainingBehavior],
    ) -> None:
        """Open the run for these cells; ``conducts`` says of each how its subject declares that it trains.

        Raises:
            PlanError: the run that is gone on with does not know one of them.
            NothingToResume: or was begun with other versions of the subjects' libraries, or other declarations.
            ResultsError: nothing can be written there.
        """
        self._command = command
        if self._resumed is not None:
            self._go_on(self._resumed, {cell.id for cell in (*examined, *measured)}, subjects, conducts)
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
            conducts=conducts,
        )
        self._writer = RunWriter(self._options.report_dir, header)

    def _go_on(
        self,
        resumed: Run,
        chosen: Set[str],
        subjects: Mapping[str, Software],
        conducts: Mapping[Cell, TrainingBehavior],
    ) -> None:
        """Open the run that broke off, for cells that it means to answer for."""
        unknown = chosen - {planned.cell for planned in resumed.header.planned}
        if unknown:
            raise PlanError(
                f"--resume: {resumed.path} was not to answer for {min(unknown)}: select what it was begun with: "
                f"{command_line(*resumed.header.command)}"
            )
        for name, software in subjects.items():
            if (before := resumed.header.subjects.get(name, software)) != software:
                raise NothingToResume(
                    f"--resume: {resumed.path} examined {name} with {before}, and now it is {software}."
                )
        declared = {cell.id: conduct.declared for cell, conduct in conducts.items()}
        for planned in resumed.header.planned:
            if not planned.measured and (now := declared.get(planned.cell, planned.conduct)) != planned.conduct:
                raise NothingToResume(
                    f"--resume: in {resumed.path} {planned.subject} declares {planned.conduct or 'nothing'}, "
                    f"and now it declares {now or 'nothing'}: its cells would be judged by other rules."
                )
        self._writer, run = RunWriter.resume(resumed.path)
        self._results, self._measurements = list(run.results), list(run.measurements)

    def _run_to_resume(self) -> Run | None:
        asked = self._options.resume
        if asked is None:
            return None
        run = read_run(self._options.report_dir / LATEST if asked == LATEST else Path(asked))
        recorded = self._options.recorded
        differing = [name for name, value in recorded.items() if run.header.options.get(name, value) != value]
        if differing:
            raise NothingToResume(
                f"--resume: {run.path} was begun with other options ({', '.join(differing)}): repeat its own: "
                f"{command_line(*run.header.command)}"
            )
        if run.header.fingerprint.key != take_fingerprint(self._options.matrix.accelerator).key:
            raise NothingToResume(f"--resume: {run.path} was begun on another machine, or with other software.")
        return run

    def new_folder(self) -> Path:
        """Return an empty folder for the evidence of a launch; it is removed with the run."""
        if self._own is None:
            # What ranks on other machines write must lie where this process sees it.
            elsewhere = self._options.launcher.nodes is not None
            self._own = Workspace.new(self._options.report_dir.resolve() if elsewhere else None)
            self._workspaces[self._own.path] = self._own
        return self._own.folder()

    def take(self, report: pytest.TestReport) -> None:
        """Write a cell's findings as soon as they are here, and keep its evidence if somebody may want it."""
        found = handed(report)
        if found is None or self._writer is None:
            return
        self._results += found.results
        self._measurements += found.measurements
        with _ending_in_a_sentence():
            self._writer.write(*found.measurements, *found.results)
            if found.evidence is not None:
                self._keep(found.evidence, found.results, self._writer.path)

    def _keep(self, folder: Path, results: Sequence[Result], run: Path) -> None:
        if folder.parent not in self._workspaces and folder.is_dir():
            # An xdist worker's, who may be gone before us.
            self._workspaces[folder.parent] = Workspace.of(folder.parent)
        # What was expected to be bad, and may be judged better one day, is evidence too.
        wanted = any(result.outcome.is_bad or result.expected for result in results)
        if not wanted and not self._options.keep_traces:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            kept = run / "traces" / results[0].cell
            shutil.rmtree(kept, ignore_errors=True)  # from before the run was resumed
            shutil.move(folder, kept)

    def finish(self, exitstatus: int, left_out: Iterable[Result] = ()) -> None:
        """Close the run, unless somebody interrupted it, and write its tables.

        ``left_out`` are the records of cells that no test speaks of: a run that is whole has them too.
        """
        for workspace in self._workspaces.values():
            # An xdist worker has no writer: what it leaves is still to be looked through.
            workspace.leave(remove=self._writer is not None)
        self._workspaces.clear()
        if self._writer is None:
            return
        if exitstatus != pytest.ExitCode.INTERRUPTED:
            with _ending_in_a_sentence():
                unsaid = [result for result in left_out if result.coordinates not in self._known]
                self._results += unsaid
                self._writer.write(*unsaid, *scaling(self._measurements))
                self._writer.close(Footer.of(self._results, int(exitstatus)))
        with _ending_in_a_sentence():
            write_report(self._writer.path)


@contextmanager
def _ending_in_a_sentence() -> Iterator[None]:
    """End the session, as if somebody had interrupted it, where what it found cannot be written."""
    try:
        yield
    except (ResultsError, OSError) as error:
        told = f"{error} What is there can be gone on with: --resume."
        pytest.exit(told, returncode=int(pytest.ExitCode.INTERRUPTED))
