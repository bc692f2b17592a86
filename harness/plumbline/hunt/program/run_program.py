"""Renders programs from a subject's template in ``programs/``, and runs them as their readers would."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import IO

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateNotFound

from plumbline.hunt.program.problem import NotExpressedError, Problem
from plumbline.worker.processes import TAG, end_tagged

MOST_LINES = 80  # non-empty lines of a program


class NoTemplateError(NotExpressedError):
    """The subject has no template; ``advice`` says what to add."""

    def __init__(self, file: Path) -> None:
        super().__init__("the subject has no template")
        self.advice = f"Write `{file}` with the trainer's own lines. `plumbline/subjects/programs/` has examples."


def render(problem: Problem, folder: Path, title: str) -> str:
    """Return a program that trains with the subject whose adapter is in ``folder``, or raise ``NotExpressedError``."""
    name = f"{problem.cell.subject}.py.jinja"
    try:
        template = _environment(folder / "programs").get_template(name)
    except TemplateNotFound:
        raise NoTemplateError(folder / "programs" / name) from None
    return _checked(template.render(p=problem, title=title, alone=False))


def render_by_hand(problem: Problem, title: str) -> str:
    """Return a program that trains a problem by hand on one device, and prints the weights; see ``render``."""
    return _checked(_environment(Path()).get_template("program.py.jinja").render(p=problem, title=title, alone=True))


def _checked(text: str) -> str:
    lines = sum(1 for line in text.splitlines() if line.strip())
    if lines > MOST_LINES:
        raise NotExpressedError(f"the program would have {lines} lines, more than {MOST_LINES}")
    return text.strip("\n") + "\n"


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folder), PackageLoader("plumbline.hunt.program", "")]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def cannot(what: str) -> None:
        raise NotExpressedError(f"the template cannot express {what}")

    environment.globals["cannot"] = cannot
    return environment


TIME_LIMIT_S = 180.0
RUNS = 4
"""Maximum number of runs of a program that fails without saying why."""
_LINES_OF_AN_ERROR = 6
_RANK = re.compile(r"^\[rank\d+\]: ?")
_ERROR = re.compile(r"(Deviates:|[\w.]*(Error|Exception)\b)")  # the start of a line that says why a program ended
_OTHER = re.compile(rf"Traceback|[WE]\d{{4}} |{_ERROR.pattern}")
"""The start of a later line that is from another rank, or from torchrun."""


class Shown(Enum):
    """Whether a run of a program shows the failure."""

    YES = "shows the failure"
    NO = "does not show the failure"
    BROKE = "failed for another reason"


@dataclass(frozen=True)
class ProgramRun:
    """A run that ended. ``printed`` has each line once for all ranks; ``exit_code`` is None after the time limit."""

    exit_code: int | None
    printed: str
    error: str

    def shows(self, expected_error: str | None) -> Shown:
        """Return whether it shows the deviation, or raises the kind of exception that ``expected_error`` names."""
        if self.error.startswith("Deviates:"):
            return Shown.YES
        if self.exit_code == 0:
            return Shown.NO
        kind = self.error.partition(":")[0].rpartition(".")[2].strip()
        return Shown.YES if expected_error and kind and kind in expected_error else Shown.BROKE


def command_of(program: Path, ranks: int) -> list[str]:
    """Return the words of the command that runs a program in the current folder."""
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", str(ranks)]
    return [*(torchrun if ranks > 1 else ["python"]), str(program)]


def run_program(
    program: Path, ranks: int, python: str, modules: Path | None = None, time_limit: float = TIME_LIMIT_S
) -> ProgramRun:
    """Run a program with the interpreter ``python``, in a folder of its own, and leave nothing running.

    torchrun starts it if it has several ``ranks``. ``modules`` is a folder that the interpreter searches first, with
    modules that its environment lacks. A program that fails without saying why is run again, because torch aborts some
    processes as they end, on a busy machine one in ten.
    """
    for _ in range(RUNS):
        run = _run(program, ranks, python, modules, time_limit)
        if not run.exit_code or run.error:
            break
    return run


def _run(program: Path, ranks: int, python: str, modules: Path | None, time_limit: float) -> ProgramRun:
    tag = secrets.token_hex(8)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    # With unbuffered output, ranks would write a line in two pieces, mixed with those of other ranks.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (
        tempfile.TemporaryDirectory(prefix="plumbline-") as folder,
        # Files, because a full pipe would block the program, and a pipe that a leftover rank holds would not end.
        tempfile.TemporaryFile("w+", errors="replace") as printed,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        if modules is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(modules), environment.get("PYTHONPATH")]))
        environment |= {"OMP_NUM_THREADS": "1", TAG: tag, "TMPDIR": folder}  # torchrun leaves logs there
        process = subprocess.Popen(
            [python, *torchrun, str(program.resolve())],
            cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=printed, stderr=errors,
        )  # fmt: skip
        exit_code = None
        try:
            exit_code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_tagged(tag)  # torchrun's ranks have sessions of their own
            process.wait()
        lines, error = _text(printed).splitlines(), _error_of(_text(errors))
    return ProgramRun(exit_code, "\n".join(dict.fromkeys(lines)), error if exit_code != 0 else "")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _error_of(text: str) -> str:
    # torchrun's own exception is the last one, and says nothing about a rank's.
    lines = [_RANK.sub("", line) for line in text.partition("torch.distributed.elastic")[0].splitlines()]
    indices = [index for index, line in enumerate(lines) if _ERROR.match(line)]
    if not indices:
        return ""
    block = [line for line in lines[indices[0] : indices[0] + _LINES_OF_AN_ERROR] if line.strip()]
    end = next((index for index, line in enumerate(block) if index and _OTHER.match(line)), len(block))
    return "\n".join(block[:end])
