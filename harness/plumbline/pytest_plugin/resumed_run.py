"""The run that ``--resume`` continues, and whether this session would examine the same things in the same way."""

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
from plumbline.results.errors import NothingToResume
from plumbline.results.header_footer import SubjectCode
from plumbline.results.run import LATEST, Run, read_run


def find_resumed_run(options: Options) -> Run | None:
    """Return the run that the options resume; None if they resume none, or the latest where there is none yet.

    A run that was interrupted before its first cell was known has left nothing: then a new one begins.

    Raises:
        ResultsError: it cannot be read.
        NothingToResume: it was begun with other options, or on another machine.
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
            f"--resume: {run.path} was begun with other options ({', '.join(differing)}): repeat its command: "
            f"{command_line(*run.header.command)}"
        )
    for name, source in options.workload_sources.items():
        if run.header.workloads.get(name, source).sha256 != source.sha256:
            raise NothingToResume(
                f"--resume: {source.locator} has changed since {run.path} was begun, and its cells would be judged by "
                "two versions of it: begin a new run"
            )
    if run.header.fingerprint.key != take_fingerprint(options.matrix.accelerator).key:
        raise NothingToResume(f"--resume: {run.path} was begun on another machine, or with other software.")
    return run


def check_unchanged(
    run: Run,
    chosen: Set[str],
    subjects: Mapping[str, Software],
    code: Mapping[str, SubjectCode],
    behaviors: Mapping[Cell, TrainingBehavior],
) -> None:
    """Refuse to continue ``run`` with cells it has not planned, or with subjects that are not what they were.

    ``chosen`` are ids of cells. ``behaviors`` has what each cell's subject declares of its way of training.

    Raises:
        PlanError: a cell is not planned in the run.
        NothingToResume: a subject or its library has another version now, or its declarations differ.
    """
    unknown = chosen - {planned.cell for planned in run.header.planned}
    if unknown:
        raise PlanError(
            f"--resume: {run.path} has not planned {min(unknown)}: select what it was begun with: "
            f"{command_line(*run.header.command)}"
        )
    for name, software in subjects.items():
        if (before := run.header.subjects.get(name, software)) != software:
            raise NothingToResume(f"--resume: {run.path} examined {name} with {before}, and now it is {software}.")
    for name, present in code.items():
        if run.header.code.get(name, present).sha256 != present.sha256:
            raise NothingToResume(
                f"--resume: the source of {name} has changed since {run.path} was begun, whose cells would then be of "
                "two trainers: begin a new run"
            )
    declared = {cell.id: behavior.declared for cell, behavior in behaviors.items()}
    for planned in run.header.planned:
        if not planned.measured and (now := declared.get(planned.cell, planned.conduct)) != planned.conduct:
            raise NothingToResume(
                f"--resume: in {run.path} {planned.subject} declares {planned.conduct or 'nothing'}, "
                f"and now it declares {now or 'nothing'}: its cells would be judged by other rules."
            )
