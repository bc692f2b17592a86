"""Follows a submission to its end: tells how it stands, sends again what a task left undone, collects the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from harness.results.run import Run
from harness.slurm.collect import Collected, clear, collect, write
from harness.slurm.scheduler import GONE, NOBODYS_FAULT, TaskState, sbatch, states
from harness.slurm.submission import Submission

SHORTEST_WAIT, LONGEST_WAIT = 0.5, 15.0
"""Seconds between two looks: a job that is over soon is seen soon, and a long one does not burden SLURM."""


@dataclass
class Follower:
    """Follows one submission; ``tell`` is handed a line whenever something has changed.

    A task that ends before its cells are whole is sent again with those that are missing: always where it was nobody's
    fault (preempted, its node failed), else as long as it comes forward, and once when it did not. A task that somebody
    cancelled is left.
    """

    submission: Submission
    tell: Callable[[str], None]
    _jobs: dict[int, int] = field(default_factory=dict)
    _before: dict[int, int] = field(default_factory=dict)
    _idle: Counter[int] = field(default_factory=Counter)
    _left: dict[int, str] = field(default_factory=dict)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def follow(self) -> Run | None:
        """Wait until nothing is left to wait for, and return the run; None where no task ever began.

        Raises:
            SchedulerError, ResultsError: SLURM does not answer, or a part cannot be read.
        """
        self._jobs = self.submission.jobs()
        self._begin()
        said, wait = "", SHORTEST_WAIT
        while True:
            standing = self._standing()
            collected = collect(self.submission)
            ended = [task for task, state in standing.items() if not state.is_live and task not in self._left]
            self._go_on_with({task: standing[task] for task in ended}, collected)
            line = progress(self.submission, collected, standing)
            if line != said:
                self.tell(line)
                said, wait = line, SHORTEST_WAIT
            if not any(state.is_live for state in standing.values()) and not self._missing_tasks(collected):
                break
            time.sleep(wait)
            wait = min(wait * 1.3, LONGEST_WAIT)
        for task, why in sorted(self._left.items()):
            self.tell(f"task {task}: {why}")
        if collected.unlike:
            self.tell("tasks ran on unlike machines: figures of this run are not to be compared with each other")
        run = write(self.submission, collected)
        if run is not None and not run.incomplete:
            clear(self.submission)
        return run

    def _begin(self) -> None:
        """Send every task that has cells to examine and is not under way."""
        standing, collected = self._standing(), collect(self.submission)
        missing = {task: self._missing(task, collected) for task in range(len(self.submission.tasks))}
        self._send({task: cells for task, cells in missing.items() if cells and not standing[task].is_live}, collected)

    def _standing(self) -> dict[int, TaskState]:
        """Return how each task stands, by its last job."""
        told = states(self._jobs.values())
        tasks = range(len(self.submission.tasks))
        return {task: told.get((self._jobs[task], task), GONE) if task in self._jobs else GONE for task in tasks}

    def _missing(self, task: int, collected: Collected) -> list[str]:
        return [cell for cell in self.submission.tasks[task] if cell not in collected.cells]

    def _missing_tasks(self, collected: Collected) -> list[int]:
        """Return the tasks that lack cells and were not given up."""
        tasks = range(len(self.submission.tasks))
        return [task for task in tasks if task not in self._left and self._missing(task, collected)]

    def _go_on_with(self, ended: Mapping[int, TaskState], collected: Collected) -> None:
        again: dict[int, list[str]] = {}
        for task, state in ended.items():
            missing = self._missing(task, collected)
            place = (self._jobs[task], task)
            if not missing or place not in self._seen:
                # What it wrote last may be here a little later than the news of its end.
                self._seen.add(place)
                continue
            if state.is_cancelled:
                self._left[task] = f"job {self._jobs[task]}_{task} was cancelled; {_cells(len(missing))} not examined"
                continue
            if state.name not in NOBODYS_FAULT:
                self._idle[task] = (
                    0
                    if len(missing) < self._before.get(task, len(self.submission.tasks[task]))
                    else self._idle[task] + 1
                )
            if self._idle[task] > 1:
                self._left[task] = (
                    f"ended twice ({state.name or 'SLURM has forgotten how'}) and examined nothing more; "
                    f"{_cells(len(missing))} not examined: see {self._log(task)}"
                )
                continue
            how = state.name.lower().replace("_", " ") or "is gone"
            self.tell(f"task {task} ({how}) left {_cells(len(missing))} undone: they are sent again")
            again[task] = missing
        self._send(again, collected)

    def _send(self, missing: Mapping[int, Collection[str]], collected: Collected) -> None:
        if not missing:
            return
        for task, cells in missing.items():
            self.submission.select(task, list(cells))
            self._before[task] = len(cells)
        job = sbatch(self.submission.batch.text(), ",".join(map(str, missing)))
        self.submission.sent(job, list(missing))
        self._jobs.update(dict.fromkeys(missing, job))
        self.tell(f"job {job}: {_cells(sum(map(len, missing.values())))} in {_tasks(len(missing))}")

    def _log(self, task: int) -> str:
        return str(self.submission.log(self._jobs[task], task))


def progress(submission: Submission, collected: Collected, standing: Mapping[int, TaskState]) -> str:
    """Return one line: how many tasks stand how, and why they wait; how many cells are examined, and how many bad."""
    counts = Counter(state.name.lower() for state in standing.values() if state.is_live)
    reasons = sorted({state.reason for state in standing.values() if state.name == "PENDING" and state.reason})
    waiting = f" ({'; '.join(reasons)})" if reasons else ""
    tasks = ", ".join(f"{count} {name}{waiting if name == 'pending' else ''}" for name, count in counts.items())
    bad = f", {collected.bad} bad" if collected.bad else ""
    return f"{len(collected.cells)} of {_cells(len(submission.cells))}{bad}; tasks: {tasks or 'all ended'}"


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"
