"""Interrupts a user's training, resumes it, and compares it with one that was not interrupted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.check.command.checked_command import CheckedCommand, record, run_and_judge
from plumbline.check.command.running import CommandEnd, EndedBy
from plumbline.check.evidence.options import RecordingOptions
from plumbline.core.errors import PlanError
from plumbline.core.numbers import counted

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
        steps: the number of steps after which the first training is ended, before it begins another one.
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
            whole = record(_in(command, f"{saved}/whole"), recording, time_limit=time_limit).trainings
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
