"""Follows a submission to its end: shows progress, resubmits unfinished cells, collects the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from plumbline.report.text import counted
from plumbline.results.run import Run
from plumbline.submit.collect import Collected, clear, collect, write
from plumbline.submit.engine import FORGOTTEN, Phase, TaskState
from plumbline.submit.submission import Submission

SHORTEST_WAIT, LONGEST_WAIT = 0.5, 15.0
"""Seconds between two polls. They grow, so that long jobs do not burden the engine."""


@dataclass
class Follower:
    """Follows one submission; ``notify`` receives a line whenever something changes.

    A task that ends before its cells are complete is resubmitted with the missing ones: always if the engine ended it
    (preempted, its node failed), else as long as each attempt examines some cells, and once if it examines none. A
    cancelled task is not resubmitted.
    """

    submission: Submission
    notify: Callable[[str], None]
    _jobs: dict[int, str] = field(default_factory=dict)
    _before: dict[int, int] = field(default_factory=dict)
    _failed_attempts: Counter[int] = field(default_factory=Counter)
    _given_up: dict[int, str] = field(default_factory=dict)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def follow(self) -> Run | None:
        """Wait for the tasks, and return the run; None if no task ever began.

        Raises:
            EngineError, SchedulerError, ResultsError: The engine does not answer, or a task's run cannot be read.
        """
        self._jobs = self.submission.jobs()
        self._submit_unfinished()
        last, wait = "", SHORTEST_WAIT
        while True:
            states_by_task = self._states()
            collected = collect(self.submission)
            ended = [task for task, state in states_by_task.items() if not state.is_live and task not in self._given_up]
            self._resubmit({task: states_by_task[task] for task in ended}, collected)
            line = progress(self.submission, collected, states_by_task)
            if line != last:
                self.notify(line)
                last, wait = line, SHORTEST_WAIT
            if not any(state.is_live for state in states_by_task.values()) and not self._missing_tasks(collected):
                break
            time.sleep(wait)
            wait = min(wait * 1.3, LONGEST_WAIT)
        for task, why in sorted(self._given_up.items()):
            self.notify(f"task {task}: {why}")
        if collected.unlike:
            self.notify("tasks ran on different machines: do not compare figures of this run with each other")
        run = write(self.submission, collected)
        if run is not None and not run.incomplete:
            clear(self.submission)
            self.submission.engine.end(self.submission)
        return run

    def _submit_unfinished(self) -> None:
        states_by_task, collected = self._states(), collect(self.submission)
        missing = {task: self._missing(task, collected) for task in range(len(self.submission.tasks))}
        self._submit({task: cells for task, cells in missing.items() if cells and not states_by_task[task].is_live})

    def _states(self) -> dict[int, TaskState]:
        found = self.submission.engine.states(self.submission, self._jobs)
        return {task: found.get(task, FORGOTTEN) for task in range(len(self.submission.tasks))}

    def _missing(self, task: int, collected: Collected) -> list[str]:
        return [cell for cell in self.submission.tasks[task] if cell not in collected.cells]

    def _missing_tasks(self, collected: Collected) -> list[int]:
        tasks = range(len(self.submission.tasks))
        return [task for task in tasks if task not in self._given_up and self._missing(task, collected)]

    def _resubmit(self, ended: Mapping[int, TaskState], collected: Collected) -> None:
        again: dict[int, list[str]] = {}
        for task, state in ended.items():
            missing = self._missing(task, collected)
            place = (self._jobs[task], task)
            if not missing or place not in self._seen:
                # On a network file system, its last records may appear after its end.
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
                    f"{counted(len(missing), 'cell')} not examined: see {self._log(task)}"
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

    def _log(self, task: int) -> str:
        return self.submission.engine.log(self.submission, self._jobs[task], task)


def progress(submission: Submission, collected: Collected, states_by_task: Mapping[int, TaskState]) -> str:
    counts = Counter(state.name.lower() for state in states_by_task.values() if state.is_live)
    pending = [state for state in states_by_task.values() if state.name.lower() == "pending"]
    reasons = sorted({state.reason for state in pending if state.reason})
    waiting = f" ({'; '.join(reasons)})" if reasons else ""
    tasks = ", ".join(f"{count} {name}{waiting if name == 'pending' else ''}" for name, count in counts.items())
    bad = f", {collected.bad} bad" if collected.bad else ""
    return f"{len(collected.cells)} of {counted(len(submission.cells), 'cell')}{bad}; tasks: {tasks or 'all ended'}"
