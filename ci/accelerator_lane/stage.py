"""One stage of the lane: a command with a time limit, and its result."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, TIMED_OUT, CUT, MISSING = "passed", "failed", "timed out", "cut", "could not start"
"""Outcomes. ``cut``: the time for all stages ended first, so this stage is due again when the lane is resumed."""

DUE = (CUT, "running", "not reached")
"""Outcomes after which a resumed lane runs the stage again."""

GRACE_S = (20.0, 5.0)
"""Seconds between signals: SIGINT, then SIGTERM, then SIGKILL."""

_SUMMARY = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+)(?: in [0-9.]+s.*)?=*$")
_COUNT = re.compile(r"(\d+) ([a-z]+)")
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Stage:
    """A command and its time limit in seconds.

    ``suite``: the command is a pytest run over ``suites/`` that writes a run below the stage's folder, and can be
    continued there. ``{folder}`` in an argument stands for that folder. ``why`` says what the stage is for.
    """

    name: str
    why: str
    command: tuple[str, ...]
    limit_s: float
    suite: bool = False

    def arguments(self, folder: Path, *, proceed: bool = False) -> list[str]:
        """Return the command for a stage with this ``folder``; ``proceed`` continues its unfinished run."""
        words = [word.replace("{folder}", str(folder)) for word in self.command]
        if self.suite:
            words += ["--report-dir", str(folder)]
            if proceed:
                words.append("--resume")
        return words


@dataclass
class StageResult:
    """The result of a stage. ``counts`` are pytest's, by outcome; ``seconds`` add up over continuations."""

    name: str
    outcome: str
    exit_code: int | None = None
    seconds: float = 0.0
    limit_s: float = 0.0
    command: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    left_behind: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def run_stage(
    stage: Stage, folder: Path, log: Path, environment: Mapping[str, str], seconds: float, *, cwd: Path, proceed: bool
) -> StageResult:
    """Run a stage for at most ``seconds``; append its output to ``log``.

    When the time is over, the command is interrupted as by Ctrl-C, then terminated, then killed. Afterwards, all
    processes that it started are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = stage.arguments(folder, proceed=proceed)
    result = StageResult(stage.name, "running", limit_s=stage.limit_s, command=" ".join(words))
    adopt_orphans()
    before = children_of(os.getpid())
    begun = time.monotonic()
    timed_out = False
    with log.open("ab") as output:
        output.write(f"$ {result.command}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            result.outcome = MISSING
            return result
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(process)
        except BaseException:
            _end(process)
            raise
        finally:
            result.left_behind = _kill_all(children_of(os.getpid()) - before)
    result.seconds = time.monotonic() - begun
    result.exit_code = process.returncode
    if timed_out:
        result.outcome = TIMED_OUT if seconds >= stage.limit_s else CUT
    else:
        result.outcome = PASSED if process.returncode == 0 else FAILED
    result.counts = counts_in(log.read_text(errors="replace"))
    return result


def counts_in(text: str) -> dict[str, int]:
    """Return the counts in the last pytest summary line of ``text``; empty if there is none."""
    for line in reversed(text.splitlines()):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line).strip()
        if found := _SUMMARY.match(plain):
            return {name: int(number) for number, name in _COUNT.findall(found[1])}
    return {}


def adopt_orphans() -> None:
    """On Linux, become the parent of orphaned descendants, so that they can be found and killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """Return the ids of all processes below ``pid``, from /proc; empty if there is no /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name in parentheses may contain spaces and parentheses: state and parent id follow the last one.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    pending = [pid]
    while pending:
        parent = pending.pop()
        below = {child for child, above in parents.items() if above == parent} - found
        found |= below
        pending.extend(below)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the command's session, then terminate it, then kill it; wait until it has ended."""
    for number, grace in zip((signal.SIGINT, signal.SIGTERM), GRACE_S, strict=True):
        _signal_session(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            return
    _signal_session(process.pid, signal.SIGKILL)
    process.wait()


def _signal_session(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _kill_all(pids: set[int]) -> int:
    """Kill and reap processes that a command left behind; return how many were still running."""
    running = 0
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            running += 1
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return running


def shortest(words: Sequence[str]) -> str:
    """Return a command as one line, without its program's folder."""
    return " ".join([Path(words[0]).name, *words[1:]])
