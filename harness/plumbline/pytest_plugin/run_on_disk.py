"""The run on disk during a session, the run that ``--resume`` continues, and the records that xdist's workers send."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from plumbline.benchmark.measurements import scaling
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.invocation import command as command_line
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.planning.options import Options
from plumbline.report.formats import write_report
from plumbline.report.text import printable
from plumbline.results.files import NothingToResume, ResultsError
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Coordinates, Measurement, PlannedCell, Result
from plumbline.results.run import LATEST, PROFILES, Run, read_run, record_of
from plumbline.results.run_writer import RunWriter
from plumbline.worker.scratch import RUN, Scratch

_RECORDS = "plumbline"
_OUTCOME = "plumbline-outcome"


@dataclass(frozen=True)
class ReportPayload:
    """The records of a cell, and the folders of its trace and profile."""

    results: tuple[Result, ...]
    measurements: tuple[Measurement, ...]
    evidence: Path | None
    profile: Path | None = None


def attach_outcome(item: pytest.Item, outcome: str) -> None:
    item.user_properties.append((_OUTCOME, outcome))


def attach_properties(item: pytest.Item, results: Sequence[Result]) -> None:
    """Attach the properties of a test in JUnit's XML: the cell and its first finding."""
    first = results[0]
    place = {"step": first.step, "rank": first.rank, "parameter": first.parameter}
    told = {"cell": first.cell, "check": first.check, "cause": first.cause, "family": first.family, **place}
    item.user_properties += [
        (name, printable(str(value)))
        for name, value in (*told.items(), ("command", first.reproduce))
        if value not in (None, "")
    ]


def outcome_of(report: pytest.TestReport) -> str | None:
    """Return the outcome in the report of a test's call, None for setup and teardown."""
    return str(dict(report.user_properties).get(_OUTCOME)) if report.when == "call" else None


def attach_payload(
    item: pytest.Item, records: Iterable[Result | Measurement], evidence: str | None, profile: str | None
) -> None:
    lines = [record.model_dump_json() for record in records]
    payload = {"records": lines, "evidence": evidence, "profile": profile}
    item.user_properties.append((_RECORDS, json.dumps(payload)))


def payload_of(report: pytest.TestReport) -> ReportPayload | None:
    found = dict(report.user_properties).get(_RECORDS)
    if report.when != "call" or found is None:
        return None
    values = json.loads(str(found))
    records = [record_of(line.encode()) for line in values["records"]]
    return ReportPayload(
        tuple(record for record in records if isinstance(record, Result)),
        tuple(record for record in records if isinstance(record, Measurement)),
        *(None if values[name] is None else Path(values[name]) for name in ("evidence", "profile")),
    )


def find_resumed_run(options: Options) -> Run | None:
    """Return the run to resume, None if there is none; raise ``ResultsError`` if it does not match the options."""
    if options.resume is None:
        return None
    latest = options.report_dir / LATEST
    if options.resume == LATEST and not latest.exists():
        return None
    run = read_run(latest if options.resume == LATEST else Path(options.resume))
    differing = [name for name, value in options.recorded.items() if run.header.options.get(name, value) != value]
    if differing:
        raise NothingToResume(
            f"--resume: {run.path} was begun with other options ({', '.join(differing)}). Repeat its command: "
            f"{command_line(*run.header.command)}"
        )
    for name, source in options.workload_sources.items():
        if run.header.workloads.get(name, source).sha256 != source.sha256:
            raise NothingToResume(f"--resume: {source.locator} has changed since {run.path} was begun: begin a new run")
    if run.header.fingerprint.key != take_fingerprint(options.matrix.accelerator).key:
        raise NothingToResume(
            f"--resume: {run.path} was begun on another machine or with other software: begin a new run"
        )
    return run


def check_unchanged(run: Run, now: Header, behaviors: Mapping[Cell, TrainingBehavior]) -> None:
    """Raise ``PlanError`` or ``NothingToResume`` if the session with the header ``now`` cannot continue ``run``."""
    unknown = {planned.cell for planned in now.planned} - {planned.cell for planned in run.header.planned}
    if unknown:
        raise PlanError(
            f"--resume: {run.path} does not plan {min(unknown)}. Repeat its command: "
            f"{command_line(*run.header.command)}"
        )
    for name, software in now.subjects.items():
        if (before := run.header.subjects.get(name, software)) != software:
            raise NothingToResume(
                f"--resume: {run.path} tested {name} with {before}, but {software} is installed now: "
                "install the former, or begin a new run"
            )
    conduct = {cell.id: behavior.declared for cell, behavior in behaviors.items()}
    for planned in run.header.planned:
        if not planned.measured and (declared := conduct.get(planned.cell, planned.conduct)) != planned.conduct:
            raise NothingToResume(
                f"--resume: {planned.subject} declared {planned.conduct or 'nothing'} in {run.path}, "
                f"but declares {declared or 'nothing'} now: begin a new run"
            )
    for name, present in now.code.items():
        if run.header.code.get(name, present).sha256 != present.sha256:
            raise NothingToResume(
                f"--resume: the source of {name} has changed since {run.path} was begun: begin a new run"
            )


class RunOnDisk:
    """A pytest plugin that writes a session's run. Under xdist only the controller writes; workers leave it traces."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._writer: RunWriter | None = None
        self._results: list[Result] = []
        self._measurements: list[Measurement] = []
        self._undeclared: dict[Coordinates, Result] = {}
        self._command: tuple[str, ...] = ()
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

    def begin(self, header: Header, behaviors: Mapping[Cell, TrainingBehavior]) -> None:
        """Open a run with this header, or the resumed one if nothing has changed (see ``check_unchanged``)."""
        self._command = header.command
        if self._resumed is None:
            self._writer = RunWriter(self._options.report_dir, header)
            return
        check_unchanged(self._resumed, header, behaviors)
        self._writer, run = RunWriter.resume(self._resumed.path)
        self._results, self._measurements = list(run.results), list(run.measurements)

    def add_undeclared(self, results: Iterable[Result]) -> None:
        self._undeclared = {result.coordinates: result for result in results}

    def new_folder(self) -> Path:
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
        run, cell = self._writer.path, payload.results[0].cell
        with _exit_on_write_error():
            self._writer.write(*payload.measurements, *payload.results)
            if payload.evidence is not None:
                # Traces of expected failures are kept too: a later version of the judge can decide differently.
                wanted = any(result.outcome.is_bad or result.expected for result in payload.results)
                self._move(payload.evidence, run / "traces" / cell if wanted or self._options.keep_traces else None)
            if payload.profile is not None:
                self._move(payload.profile, run / PROFILES / cell)

    def _move(self, folder: Path, kept: Path | None) -> None:
        # An xdist worker may end before this process, so this process keeps its folder.
        if folder.parent not in self._scratch and folder.is_dir():
            self._scratch[folder.parent] = Scratch(folder.parent)
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            shutil.rmtree(kept, ignore_errors=True)  # from before the run was resumed
            shutil.move(folder, kept)

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
    """If the run cannot be written, end the session like an interruption."""
    try:
        yield
    except (ResultsError, OSError) as error:
        message = f"{error} Use --resume to continue."
        pytest.exit(message, returncode=int(pytest.ExitCode.INTERRUPTED))
