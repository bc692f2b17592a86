"""From the parts that tasks have written to one run: pure as far as records go, files at the edges."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core.outcome import Outcome
from harness.results.atomic import write_text
from harness.results.errors import MissingHeader
from harness.results.header_footer import Footer, Header
from harness.results.json_lines import line_of
from harness.results.records import UNEXPECTED_PASS, CellRecord, Measurement, PlannedCell, Result, ending
from harness.results.run import RESULTS, Run, read_run
from harness.slurm.submission import Submission


@dataclass(frozen=True)
class Collected:
    """What the parts hold: ``header`` is None while no task has begun, ``cells`` those that are whole, by their ids."""

    header: Header | None
    cells: Mapping[str, tuple[Result | Measurement, ...]]
    unlike: bool

    @property
    def bad(self) -> int:
        """How many cells should turn the run red."""
        return sum(map(is_bad, self.cells.values()))


def is_bad(records: Sequence[Result | Measurement]) -> bool:
    """Say whether a cell of these records should turn a run red."""
    results = [record for record in records if isinstance(record, Result)]
    end = ending(results) if results else Outcome.PASSED
    return end == UNEXPECTED_PASS or (isinstance(end, Outcome) and end.is_bad)


def collect(submission: Submission) -> Collected:
    """Read what the tasks have written so far.

    Raises:
        ResultsError: a part cannot be read.
    """
    return merged(parts_of(submission), [cell.cell for cell in submission.cells])


def parts_of(submission: Submission) -> list[Run]:
    """Return what was collected before, and every run that a task has begun, in the order of time."""
    runs = []
    for file in (*submission.run.glob(RESULTS), *submission.folder.glob(f"task-*/*/{RESULTS}")):
        if file.parent.is_symlink():
            continue
        try:
            runs.append(read_run(file))
        except MissingHeader:
            continue  # it is being begun
    return sorted(runs, key=lambda run: run.header.run_id)


def merged(parts: Sequence[Run], wanted: Iterable[str]) -> Collected:
    """Return the cells that are whole in some part. What was measured on unlike machines is ``unlike``."""
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
    """Write the run as far as there is one, over what was there; None while there is nothing.

    It has a footer when no cell is missing. Evidence of what went wrong moves to the run.
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
    """Return every cell as its task had it: the machine that submits may not have the devices."""
    assert collected.header is not None
    accelerator = next((planned.accelerator for planned in collected.header.planned), "cpu")
    for cell in submission.cells:
        record: CellRecord | None = next(iter(collected.cells.get(cell.cell, ())), None)
        values = {**cell.planned, "accelerator": record.accelerator if record else accelerator}
        yield PlannedCell.model_validate(values)


def _move_traces(submission: Submission, collected: Collected) -> None:
    traces = submission.run / "traces"
    for folder in submission.folder.glob("task-*/*/traces/*"):
        if folder.name in collected.cells and not folder.parent.parent.is_symlink():
            traces.mkdir(exist_ok=True)
            shutil.rmtree(traces / folder.name, ignore_errors=True)
            shutil.move(folder, traces / folder.name)


def clear(submission: Submission) -> None:
    """Remove what the tasks left that the run has now: their parts, and evidence nobody came to judge."""
    for task in range(len(submission.tasks)):
        shutil.rmtree(submission.part(task), ignore_errors=True)
