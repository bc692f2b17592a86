"""Merges the runs of a submission's tasks into one run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plumbline.core.outcome import Outcome
from plumbline.results.files import MissingHeader, write_text
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import UNEXPECTED_PASS, CellRecord, Measurement, PlannedCell, Result, ending
from plumbline.results.run import RESULTS, Run, line_of, read_run
from plumbline.submit.submission import Submission


@dataclass(frozen=True)
class Collected:
    """The records of all tasks; ``cells`` are the complete ones by id. ``header`` is None until a task has begun.

    ``unlike``: tasks ran on machines whose figures cannot be compared.
    """

    header: Header | None
    cells: Mapping[str, tuple[Result | Measurement, ...]]
    unlike: bool

    @property
    def bad(self) -> int:
        return sum(map(is_bad, self.cells.values()))


def is_bad(records: Sequence[Result | Measurement]) -> bool:
    results = [record for record in records if isinstance(record, Result)]
    end = ending(results) if results else Outcome.PASSED
    return end == UNEXPECTED_PASS or (isinstance(end, Outcome) and end.is_bad)


def collect(submission: Submission) -> Collected:
    """Read what the tasks have written so far.

    Raises:
        ResultsError: The run of a task cannot be read.
    """
    return merged(parts_of(submission), [cell.cell for cell in submission.cells])


def parts_of(submission: Submission) -> list[Run]:
    """Return the run that was collected before, and every run that a task has begun, in order of their starts."""
    runs = []
    for file in (*submission.run.glob(RESULTS), *submission.folder.glob(f"task-*/*/{RESULTS}")):
        if file.parent.is_symlink():
            continue
        try:
            runs.append(read_run(file))
        except MissingHeader:
            continue  # its header is being written
    return sorted(runs, key=lambda run: run.header.run_id)


def merged(parts: Sequence[Run], wanted: Iterable[str]) -> Collected:
    """Return the cells that are complete in one of the ``parts``, in the order of ``wanted``."""
    cells: dict[str, tuple[Result | Measurement, ...]] = {}
    for run in parts:
        whole = run.whole
        found: dict[str, list[Result | Measurement]] = {}
        records: tuple[Result | Measurement, ...] = (*run.results, *run.measurements)
        for record in records:
            if record.coordinates in whole or (isinstance(record, Measurement) and run.footer):
                found.setdefault(record.cell, []).append(record)
        cells |= {cell: tuple(those) for cell, those in found.items() if cell not in cells}
    order = [cell for cell in wanted if cell in cells]
    keys = {run.header.fingerprint.key for run in parts}
    header = parts[0].header if parts else None
    return Collected(header, {cell: cells[cell] for cell in order}, len(keys) > 1)


def write(submission: Submission, collected: Collected) -> Run | None:
    """Write the merged run, over an earlier one, and return it; None if no task has begun.

    The run has a footer if no cell is missing. Traces that the tasks kept are moved to it.
    """
    if collected.header is None:
        return None
    header = collected.header.model_copy(
        update={
            "run_id": submission.run.name,
            "command": submission.command,
            "planned": tuple(_planned(submission, collected)),
        }
    )
    records: list[Result | Measurement] = [record for found in collected.cells.values() for record in found]
    lines = [line_of(header), *map(line_of, records)]
    if len(collected.cells) == len(submission.cells):
        results = [record for record in records if isinstance(record, Result)]
        lines.append(line_of(Footer.of(results, int(bool(collected.bad)))))
    write_text(submission.run / RESULTS, b"".join(lines).decode())
    _move_traces(submission, collected)
    return read_run(submission.run)


def _planned(submission: Submission, collected: Collected) -> Iterable[PlannedCell]:
    """Yield every cell with the accelerator of its task. The machine that submits may have no devices."""
    assert collected.header is not None
    accelerator = next((planned.accelerator for planned in collected.header.planned), "cpu")
    for cell in submission.cells:
        record: CellRecord | None = next(iter(collected.cells.get(cell.cell, ())), None)
        values = {**cell.planned, "accelerator": record.accelerator if record else accelerator}
        yield PlannedCell.model_validate(values)


def _move_traces(submission: Submission, collected: Collected) -> None:
    traces = submission.run / "traces"
    for folder in submission.folder.glob("task-*/*/traces/*"):
        links = (folder, folder.parent, folder.parent.parent)
        if folder.name in collected.cells and not any(place.is_symlink() for place in links):
            traces.mkdir(exist_ok=True)
            shutil.rmtree(traces / folder.name, ignore_errors=True)
            shutil.move(folder, traces / folder.name)


def clear(submission: Submission) -> None:
    for task in range(len(submission.tasks)):
        shutil.rmtree(submission.part(task), ignore_errors=True)
