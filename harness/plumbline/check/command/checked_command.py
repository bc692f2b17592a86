"""Runs a user's command with recording on, also interrupted and resumed, and judges what its processes recorded."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import plumbline
from plumbline.check.command.running import (
    CommandEnd,
    CommandError,
    EndedBy,
    EndOfCommand,
    ProcessWatch,
    run_command,
    termination_as_interrupt,
)
from plumbline.check.evidence.options import INTERRUPTED, Deal, RecordingOptions, write_deal, write_options
from plumbline.core.errors import PlanError
from plumbline.core.numbers import counted

if TYPE_CHECKING:
    from plumbline.check.evidence.training import RecordedTraining
    from plumbline.check.judge.script_checks import CheckedTraining

ENVIRONMENT = "PLUMBLINE_CHECK"
"""Environment variable that names the folder of a check. The processes of the command inherit it."""

START_FOLDER = Path(__file__).parents[1] / "path"
"""Folder that is put on PYTHONPATH. Every Python process of the command runs its ``sitecustomize.py``, which installs
the recorder."""

LEAST_ROOM = 16 * 2**20
"""Bytes that must be free in the temporary folder. With less, evidence may be missing."""


_JUDGE = "plumbline.check.judge.script_checks"
"""The module that judges what was recorded. It imports torch, and all that judging needs."""


@dataclass(frozen=True)
class JudgedWindow:
    """Recorded steps of a training from ``step`` on, judged while it ran, with the answer and its reason."""

    step: int
    trainings: list[CheckedTraining]
    verdict: str
    sentence: str
    is_wrong: bool


class Judge(Protocol):
    """Judges windows of steps while a command runs."""

    judged: list[JudgedWindow]

    def look(self) -> None:
        """Judge the windows that are complete; raise ``EndOfCommand`` to end the command."""


@dataclass(frozen=True)
class CheckedCommand:
    """A command, how it ended, what its processes recorded, and what was found.

    ``processes`` are in the order in which they ended, as far as it is known.
    ``full_folder`` is the temporary folder if it had no space left when the command ended, else None.
    ``has_lost_folder``: the command removed the folder for evidence.
    ``judging_s`` is the time that judging took after the command ended. ``windows`` were judged while it ran.
    ``trainings`` are those of the first window that is wrong, or of the first window if none is wrong.
    ``settings`` are options from the project's file, as they are written there.
    """

    command: tuple[str, ...]
    options: RecordingOptions
    end: CommandEnd
    processes: list[PythonProcess]
    trainings: list[CheckedTraining]
    judging_s: float
    time_limit: float | None = None
    full_folder: Path | None = None
    has_lost_folder: bool = False
    windows: tuple[JudgedWindow, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shows_later_window(self) -> bool:
        """Whether ``trainings`` come from a window after the first one."""
        return any(one.trainings is self.trainings and one.step > self.options.after for one in self.windows)


def run_and_judge(
    command: Sequence[str],
    options: RecordingOptions,
    time_limit: float | None = None,
    judge_in: Callable[[Path], Judge] | None = None,
) -> CheckedCommand:
    """Run a command, record the first optimizer steps of all its processes, and judge them.

    The command uses this process's standard streams. After ``time_limit`` seconds it is ended, and what was recorded by
    then is judged. ``judge_in`` is called with the evidence folder, and returns the judge of its windows. The folder is
    removed at the end.

    Raises:
        CommandError: the command cannot be started, or there is no folder for evidence.
        TraceError: evidence cannot be read.
    """
    judges: list[Judge] = []

    def load() -> None:
        _import_judge()
        if judge_in is not None:
            judges.append(judge_in(folder))

    def look() -> None:
        for judge in judges:
            judge.look()

    with _folder() as folder:
        write_options(folder, options)
        # Importing torch takes a second or more, so it overlaps with the command.
        loading = Thread(target=load, daemon=True)
        loading.start()
        try:
            with closing(ProcessWatch(folder, None if judge_in is None else look)) as watch:
                ended = options.stop or options.dry_run
                variables = environment(str(folder))
                end = run_command(command, variables, ENVIRONMENT, watch, time_limit, leaves_nothing=ended)
        finally:
            loading.join()  # otherwise two threads would import torch at the same time
        if judge_in is not None and not judges:
            judges.append(judge_in(folder))  # raises what it raised in the thread
        lost = not folder.is_dir()
        full = folder.parent if not lost and shutil.disk_usage(folder).free < LEAST_ROOM else None
        from plumbline.check.judge.script_checks import judged_trainings, with_resplit

        begun = time.monotonic()
        trainings = judged_trainings(folder)
        windows = tuple(window for judge in judges for window in _windows(judge))
        trainings = next((one.trainings for one in windows if one.is_wrong), trainings)
        took = time.monotonic() - begun
        processes = read_processes(folder, watch.ended)
        if options.splits and end.by is not EndedBy.USER:
            rerun = partial(record, command, time_limit=time_limit)
            trainings = with_resplit(trainings, lambda options, deal: rerun(options, deal).trainings)
        return CheckedCommand(tuple(command), options, end, processes, trainings, took, time_limit, full, lost, windows)


def _import_judge() -> None:
    if _JUDGE not in sys.modules:
        plumbline.import_uncollected(_JUDGE)
        # Judging would search the objects of torch's modules for garbage, and so would the end of this program.
        gc.freeze()


def _windows(judge: Judge) -> tuple[JudgedWindow, ...]:
    with suppress(EndOfCommand):
        judge.look()
    return tuple(judge.judged)


@dataclass(frozen=True)
class RecordedCommand:
    """A command that ran with recording on, and its trainings. ``interrupted``: a rank ended itself on request."""

    end: CommandEnd
    trainings: Sequence[RecordedTraining]
    interrupted: bool


def record(
    command: Sequence[str], options: RecordingOptions, deal: Deal | None = None, time_limit: float | None = None
) -> RecordedCommand:
    """Run a command and record it, without judging it.

    Raises:
        CommandError: the command cannot be started, or there is no folder for evidence.
        TraceError: evidence cannot be read.
    """
    from plumbline.check.judge.script_checks import read_trainings

    with _folder() as folder, closing(ProcessWatch(folder)) as watch:
        write_options(folder, options)
        write_deal(folder, deal or {})
        end = run_command(command, environment(str(folder)), ENVIRONMENT, watch, time_limit, leaves_nothing=True)
        return RecordedCommand(end, read_trainings(folder), any(folder.glob(f"{INTERRUPTED}*")))


@contextmanager
def _folder() -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="plumbline-check-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CommandError(
            f"cannot create a temporary folder for the recording ({error.strerror or error}): set TMPDIR to a writable "
            "folder"
        ) from error
    with termination_as_interrupt(), made as folder:  # also while the recording is judged
        yield Path(folder)


def environment(folder: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(START_FOLDER), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, ENVIRONMENT: folder, "PYTHONPATH": path}


@dataclass(frozen=True)
class PythonProcess:
    """A Python process of the command: its interpreter, its command line, and how far it got.

    ``rank`` is set by the launcher, None without one. ``torch`` is the version that it imported, "" if none.
    ``obstacle`` says why nothing could be recorded, "" if nothing prevented it. ``ended`` is False if it was killed,
    and ``raised`` is the exception that ended it, "" if none did. ``optimizers``, ``passes`` and ``steps`` count what
    the recorder saw, and ``begun`` counts the optimizers that began a step; all of them are 0 if it was killed.
    """

    pid: int
    python: str
    words: tuple[str, ...]
    rank: int | None
    torch: str = ""
    obstacle: str = ""
    ended: bool = False
    raised: str = ""
    optimizers: int = 0
    passes: int = 0
    steps: int = 0
    begun: int = 0


def read_processes(folder: Path, ended: Sequence[int] = ()) -> list[PythonProcess]:
    """Return a command's Python processes: first those in ``ended``, in this order, then the others by their ids."""
    files = {int(file.name.rpartition("-")[2]): file for file in folder.glob("process-*")}
    pids = [pid for pid in ended if pid in files]
    read = [_process(pid, _facts(files[pid])) for pid in (*pids, *sorted(files.keys() - set(pids)))]
    return [one for one in read if one is not None]


def _facts(file: Path) -> Mapping[str, Any]:
    facts: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            facts |= json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
    return facts


def _process(pid: int, facts: Mapping[str, Any]) -> PythonProcess | None:
    if "python" not in facts:  # a forked process, which started no interpreter
        return None
    rank = str(facts.get("rank") or "")
    as_noted = ("torch", "ended", "raised", "optimizers", "passes", "steps", "begun")
    return PythonProcess(
        pid,
        facts["python"],
        tuple(facts.get("words", ())),
        int(rank) if rank.isdigit() else None,
        obstacle=facts.get("obstacle") or (facts.get("error") and f"recording failed: {facts['error']}") or "",
        **{name: facts[name] for name in as_noted if name in facts},
    )


if TYPE_CHECKING:
    from plumbline.check.evidence.training import RecordedTraining

FOLDER = "{folder}"
"""Placeholder in a command for the folder to which the training saves checkpoints."""

_STATE_ALONE: dict[str, Any] = {"state": True, "replays": False, "sample_parameters": 1}
"""Options for trainings whose gradients are not judged. There can be many steps, so they record only digests, and the
vectors of one parameter."""


def run_interrupted(
    command: Sequence[str],
    again: Sequence[str],
    options: RecordingOptions,
    steps: int,
    say: Callable[[str], None],
    time_limit: float | None = None,
) -> CheckedCommand:
    """Train three times: until ``steps`` steps are taken, again from what was saved, and without an interruption.

    Args:
        command: what starts the training, with ``FOLDER`` in it.
        again: what resumes it.
        options: what to record of the resumed training.
        steps: the number of steps after which the first training is ended, before its next step.
        say: called with a line before each training.
        time_limit: seconds for each training.

    Raises:
        PlanError: a command does not say where the training saves.
        CommandError: a command cannot be started, or there is no folder for evidence.
        TraceError: evidence cannot be read.
    """
    for one in (command, again):
        if not any(FOLDER in word for word in one):
            raise PlanError(
                f"--resume-after: write {FOLDER} in place of the checkpoint folder in COMMAND and in --resume-command; "
                "Plumbline fills in one folder for the interrupted training and another for the uninterrupted one"
            )
    with tempfile.TemporaryDirectory(prefix="plumbline-saved-", ignore_cleanup_errors=True) as saved:
        say(f"plumbline: 1 of 3: training until step {steps}")
        first = record(
            _in(command, f"{saved}/interrupted"),
            RecordingOptions(steps + 1, interrupt_after=steps, **_STATE_ALONE),
            time_limit=time_limit,
        )
        if first.end.by is EndedBy.USER:
            raise KeyboardInterrupt
        say("plumbline: 2 of 3: resuming")
        resumed = run_and_judge(_in(again, f"{saved}/interrupted"), replace(options, state=True), time_limit)
        if not resumed.trainings or resumed.end.by is EndedBy.USER:
            return resumed
        whole: Sequence[RecordedTraining] = ()
        why = "" if first.interrupted else _why_not_interrupted(steps, first.end)
        if not why and not any(Path(f"{saved}/interrupted").rglob("*")):
            why = (
                f"the training saved nothing in {FOLDER} in its first {counted(steps, 'step')}: save a checkpoint by "
                "then, or use a larger K"
            )
        if not why:
            say("plumbline: 3 of 3: training without an interruption")
            # Twice as many further steps as were resumed: the resumed training may have skipped batches.
            recording = RecordingOptions(steps + 2 * options.steps, stop=True, **_STATE_ALONE)
            last = record(_in(command, f"{saved}/whole"), recording, time_limit=time_limit)
            if last.end.by is EndedBy.USER:
                raise KeyboardInterrupt
            whole = last.trainings
    from plumbline.check.judge.script_checks import with_resumption

    return replace(resumed, trainings=with_resumption(first.trainings, resumed.trainings, whole, steps, why))


def _why_not_interrupted(steps: int, end: CommandEnd) -> str:
    if end.has_failed:
        return (
            f"the training that should be interrupted failed before step {steps} ({end.in_words}): run the command "
            "without Plumbline, and fix the error that it raises"
        )
    at_limit, or_longer = "", ""
    if end.by is EndedBy.TIME_LIMIT:
        at_limit, or_longer = "at the time limit, ", ", or a longer --time-limit"
    return f"the training ended {at_limit}before step {steps}, so it was not interrupted: use a smaller K{or_longer}"


def _in(command: Sequence[str], folder: str) -> list[str]:
    return [word.replace(FOLDER, folder) for word in command]
