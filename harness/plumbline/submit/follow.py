"""Merges the runs of a submission's tasks into one run, and follows the tasks until it is complete."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.results.files import MissingHeader, write_text
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import UNEXPECTED_PASS, CellRecord, Measurement, PlannedCell, Result, ending, grouped
from plumbline.results.run import RESULTS, Run, line_of, read_run
from plumbline.submit.engine import FORGOTTEN, Phase, TaskState
from plumbline.submit.submission import Submission


@dataclass(frozen=True)
class Collected:
    """The records of all tasks by cell.

    ``header`` is None until a task has begun. ``unlike`` says whether tasks ran on different machines.
    """

    header: Header | None
    cells: Mapping[str, tuple[Result | Measurement, ...]]
    unlike: bool

    @property
    def bad(self) -> int:
        results = ([one for one in records if isinstance(one, Result)] for records in self.cells.values())
        ends = [ending(found) for found in results if found]
        return sum(end == UNEXPECTED_PASS or (isinstance(end, Outcome) and end.is_bad) for end in ends)


def collect(submission: Submission) -> Collected:
    """Return the cells that are complete in one of the tasks' runs, or in the run that was collected before."""
    parts = []
    for file in (*submission.run.glob(RESULTS), *submission.folder.glob(f"task-*/*/{RESULTS}")):
        with contextlib.suppress(MissingHeader):  # the header is being written
            if not file.parent.is_symlink():
                parts.append(read_run(file))
    parts.sort(key=lambda run: run.header.run_id)
    cells: dict[str, tuple[Result | Measurement, ...]] = {}
    for run in parts:
        whole = run.whole
        records: tuple[Result | Measurement, ...] = (*run.results, *run.measurements)
        wanted = (one for one in records if one.coordinates in whole or (isinstance(one, Measurement) and run.footer))
        cells = {cell: tuple(those) for cell, those in grouped(wanted, lambda one: one.cell).items()} | cells
    header = parts[0].header if parts else None
    order = {cell.cell: cells[cell.cell] for cell in submission.cells if cell.cell in cells}
    return Collected(header, order, len({run.header.fingerprint.key for run in parts}) > 1)


def write(submission: Submission, collected: Collected) -> Run | None:
    """Write the merged run with its traces, replacing an earlier one. Return the run; None if no task has begun."""
    if collected.header is None:
        return None
    # Take each cell's accelerator from its task, because the submitting machine may have no devices.
    accelerator = next((planned.accelerator for planned in collected.header.planned), "cpu")
    planned = []
    for cell in submission.cells:
        record: CellRecord | None = next(iter(collected.cells.get(cell.cell, ())), None)
        values = {**cell.planned, "accelerator": record.accelerator if record else accelerator}
        planned.append(PlannedCell.model_validate(values))
    changed = {"run_id": submission.run.name, "command": submission.command, "planned": tuple(planned)}
    header = collected.header.model_copy(update=changed)
    records: list[Result | Measurement] = [record for found in collected.cells.values() for record in found]
    lines = [line_of(header), *map(line_of, records)]
    if len(collected.cells) == len(submission.cells):
        results = [record for record in records if isinstance(record, Result)]
        lines.append(line_of(Footer.of(results, int(bool(collected.bad)))))
    write_text(submission.run / RESULTS, b"".join(lines).decode())
    traces = submission.run / "traces"
    for folder in submission.folder.glob("task-*/*/traces/*"):
        links = (folder, folder.parent, folder.parent.parent)
        if folder.name in collected.cells and not any(place.is_symlink() for place in links):
            traces.mkdir(exist_ok=True)
            shutil.rmtree(traces / folder.name, ignore_errors=True)
            shutil.move(folder, traces / folder.name)
    return read_run(submission.run)


SHORTEST_WAIT, LONGEST_WAIT = 0.5, 15.0
"""Seconds between two polls. The interval grows, so that long jobs do not burden the engine."""


@dataclass
class Follower:
    """Follows one submission; ``notify`` receives a line whenever something changes.

    A task that ends before its cells are complete is resubmitted with the missing cells: always if the engine ended it
    (it was preempted, or its node failed), otherwise until two attempts in a row examine no cell. A cancelled task is
    not resubmitted.
    """

    submission: Submission
    notify: Callable[[str], None]
    _jobs: dict[int, str] = field(default_factory=dict)
    _before: dict[int, int] = field(default_factory=dict)
    _failed_attempts: Counter[int] = field(default_factory=Counter)
    _given_up: dict[int, str] = field(default_factory=dict)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def follow(self) -> Run | None:
        """Wait for the tasks, and return the run; None if no task began. Errors of engine and files are raised."""
        self._jobs = self.submission.jobs()
        states_by_task, collected = self._states(), collect(self.submission)
        missing = {task: self._missing(task, collected) for task in range(len(self.submission.tasks))}
        self._submit({task: cells for task, cells in missing.items() if cells and not states_by_task[task].is_live})
        last, wait = "", SHORTEST_WAIT
        while True:
            states_by_task = self._states()
            collected = collect(self.submission)
            ended = [task for task, state in states_by_task.items() if not state.is_live and task not in self._given_up]
            self._resubmit({task: states_by_task[task] for task in ended}, collected)
            line = self._progress(collected, states_by_task)
            if line != last:
                self.notify(line)
                last, wait = line, SHORTEST_WAIT
            is_live = any(state.is_live for state in states_by_task.values())
            others = (task for task in states_by_task if task not in self._given_up)
            if not is_live and not any(self._missing(task, collected) for task in others):
                break
            time.sleep(wait)
            wait = min(wait * 1.3, LONGEST_WAIT)
        for task, why in sorted(self._given_up.items()):
            self.notify(f"task {task}: {why}")
        if collected.unlike:
            self.notify("tasks ran on different machines: the figures of this run are not comparable with each other")
        run = write(self.submission, collected)
        if run is not None and not run.incomplete:
            for task in range(len(self.submission.tasks)):
                shutil.rmtree(self.submission.part(task), ignore_errors=True)
            self.submission.engine.end(self.submission)
        return run

    def _states(self) -> dict[int, TaskState]:
        found = self.submission.engine.states(self.submission, self._jobs)
        return {task: found.get(task, FORGOTTEN) for task in range(len(self.submission.tasks))}

    def _missing(self, task: int, collected: Collected) -> list[str]:
        return [cell for cell in self.submission.tasks[task] if cell not in collected.cells]

    def _resubmit(self, ended: Mapping[int, TaskState], collected: Collected) -> None:
        again: dict[int, list[str]] = {}
        for task, state in ended.items():
            missing = self._missing(task, collected)
            place = (self._jobs[task], task)
            if not missing or place not in self._seen:
                # On a network file system, a task's last records may appear after its end.
                self._seen.add(place)
                continue
            if state.phase is Phase.CANCELLED:
                self._given_up[task] = (
                    f"job {self._jobs[task]}_{task} was cancelled; {counted(len(missing), 'cell')} not examined"
                )
                continue
            if state.phase is not Phase.INTERRUPTED:
                advanced = len(missing) < self._before.get(task, len(self.submission.tasks[task]))
                self._failed_attempts[task] = 0 if advanced else self._failed_attempts[task] + 1
            if self._failed_attempts[task] > 1:
                self._given_up[task] = (
                    f"ended twice ({state.name or 'unknown state'}) without examining another cell; "
                    f"{counted(len(missing), 'cell')} not examined: "
                    f"see {self.submission.engine.log(self.submission, self._jobs[task], task)}"
                )
                continue
            how = state.name.lower().replace("_", " ") or "unknown state"
            self.notify(f"task {task} ({how}) left {counted(len(missing), 'cell')} unfinished: resubmitting")
            again[task] = missing
        self._submit(again)

    def _submit(self, missing: Mapping[int, Collection[str]]) -> None:
        if not missing:
            return
        for task, cells in missing.items():
            self.submission.select(task, list(cells))
            self._before[task] = len(cells)
        job = self.submission.engine.send(self.submission, self.submission.new_job(), list(missing))
        self.submission.add_job(job, list(missing))
        self._jobs.update(dict.fromkeys(missing, job))
        self.notify(f"job {job}: {counted(sum(map(len, missing.values())), 'cell')} in {counted(len(missing), 'task')}")

    def _progress(self, collected: Collected, states_by_task: Mapping[int, TaskState]) -> str:
        live = [state for state in states_by_task.values() if state.is_live]
        counts = Counter(state.name.lower() for state in live)
        reasons = sorted({state.reason for state in live if state.name.lower() == "pending" and state.reason})
        waiting = f" ({'; '.join(reasons)})" if reasons else ""
        tasks = ", ".join(f"{count} {name}{waiting if name == 'pending' else ''}" for name, count in counts.items())
        bad = f", {collected.bad} failing" if collected.bad else ""
        cells = counted(len(self.submission.cells), "cell")
        return f"{len(collected.cells)} of {cells}{bad}; tasks: {tasks or 'all ended'}"
