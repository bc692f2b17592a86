"""Runs a program that a hunt wrote, as its reader would, and says whether it shows the deviation."""

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
from pathlib import Path
from typing import IO

from plumbline.launch.process_tags import TAG, end_tagged

TIME_LIMIT_S = 180.0

COMPARISON = "torch.testing.assert_close("
"""The last statement of a program: what it raises is the deviation."""

_LINES_OF_AN_ERROR = 6

_RANK = re.compile(r"^\[rank\d+\]: ?")


class Shown(Enum):
    """What a run of a program says of a failure."""

    YES = "shown"
    NO = "not shown"
    BROKE = "the program broke"


@dataclass(frozen=True)
class ProgramRun:
    """``printed`` has each line once, whichever rank printed it; ``error`` is the exception that ended it, if any.

    ``exit_code`` is None where the time limit ended it.
    """

    exit_code: int | None
    printed: str
    error: str
    raised_by_comparison: bool

    def shows(self, expected_error: str | None) -> Shown:
        """Return whether it shows the deviation.

        ``expected_error`` is the message of a finding about an exception, of which the program's must be the kind; None
        of other findings.
        """
        if self.raised_by_comparison:
            return Shown.YES
        if self.exit_code == 0:
            return Shown.NO
        kind = self.error.partition(":")[0].rpartition(".")[2].strip()
        return Shown.YES if expected_error and kind and kind in expected_error else Shown.BROKE


def command_of(program: Path, ranks: int) -> list[str]:
    """Return the words of the command that runs a program, for the present folder."""
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", str(ranks)]
    return [*(torchrun if ranks > 1 else ["python"]), str(program)]


def run_program(
    program: Path, ranks: int, python: str, modules: Path | None = None, time_limit: float = TIME_LIMIT_S
) -> ProgramRun:
    """Run a program with an interpreter, in a folder of its own; nothing of it is left running.

    Args:
        program: the file.
        ranks: processes that torchrun starts; of one, it is not used.
        python: the interpreter.
        modules: a folder, if there is one, of modules that the interpreter finds first: its environment lacks them.
        time_limit: in seconds; the program is ended then.
    """
    tag = secrets.token_hex(8)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    # Unbuffered, ranks would write a line in two pieces, and into each other's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (
        tempfile.TemporaryDirectory(prefix="plumbline-") as folder,
        # Files: a full pipe would stop the program, and one that a rank left behind holds would not end.
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
        outputs, raised = _text(printed), _text(errors)
    return ProgramRun(exit_code, "\n".join(dict.fromkeys(outputs.splitlines())), *_error_of(raised))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _error_of(text: str) -> tuple[str, bool]:
    """Return the exception that a rank ended with, in a few lines, and whether the comparison raised it."""
    # torchrun's own exception is the last one, and says nothing of a rank's.
    lines = [_RANK.sub("", line) for line in text.partition("torch.distributed.elastic")[0].splitlines()]
    places = [place for place, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not places:
        return "", False
    block = [line for line in lines[places[0] : places[0] + _LINES_OF_AN_ERROR + 2] if line.strip()]
    end = next((place for place, line in enumerate(block) if place and line.startswith("Traceback")), len(block))
    raised = any(COMPARISON in line for line in lines[: places[0]]) and block[0].startswith("AssertionError")
    return "\n".join(block[:end][:_LINES_OF_AN_ERROR]), raised
