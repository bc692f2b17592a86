"""The run that ``--resume`` continues, and whether this session matches it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.invocation import command as command_line
from plumbline.core.software import Software
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.planning.options import Options
from plumbline.results.files import NothingToResume
from plumbline.results.header_footer import SubjectCode
from plumbline.results.run import LATEST, Run, read_run


def find_resumed_run(options: Options) -> Run | None:
    """Return the run to resume. None: no run is to be resumed, or ``--resume`` means the latest and there is none.

    Raises:
        ResultsError: the run cannot be read.
        NothingToResume: it was begun with other options or on another machine.
    """
    if options.resume is None:
        return None
    latest = options.report_dir / LATEST
    if options.resume == LATEST and not latest.exists():
        return None
    run = read_run(latest if options.resume == LATEST else Path(options.resume))
    recorded = options.recorded
    differing = [name for name, value in recorded.items() if run.header.options.get(name, value) != value]
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


def check_unchanged(
    run: Run,
    chosen: Set[str],
    subjects: Mapping[str, Software],
    code: Mapping[str, SubjectCode],
    behaviors: Mapping[Cell, TrainingBehavior],
) -> None:
    """Check that this session can continue ``run``.

    Args:
        run: the run to resume.
        chosen: the ids of this session's cells.
        subjects: the software of each subject.
        code: the source of each subject.
        behaviors: the behavior that each cell's subject declares.

    Raises:
        PlanError: the run does not plan one of the cells.
        NothingToResume: a subject, its library or its declarations have changed.
    """
    unknown = chosen - {planned.cell for planned in run.header.planned}
    if unknown:
        raise PlanError(
            f"--resume: {run.path} does not plan {min(unknown)}. Repeat its command: "
            f"{command_line(*run.header.command)}"
        )
    for name, software in subjects.items():
        if (before := run.header.subjects.get(name, software)) != software:
            raise NothingToResume(f"--resume: {run.path} tested {name} with {before}, and {software} is installed now")
    declared = {cell.id: behavior.declared for cell, behavior in behaviors.items()}
    for planned in run.header.planned:
        if not planned.measured and (now := declared.get(planned.cell, planned.conduct)) != planned.conduct:
            raise NothingToResume(
                f"--resume: {planned.subject} declared {planned.conduct or 'nothing'} in {run.path}, "
                f"and declares {now or 'nothing'} now: begin a new run"
            )
    for name, present in code.items():
        if run.header.code.get(name, present).sha256 != present.sha256:
            raise NothingToResume(
                f"--resume: the source of {name} has changed since {run.path} was begun: begin a new run"
            )
