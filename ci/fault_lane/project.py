"""A folder in which pytest runs as users run it, with its output and its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_lane.fault import Fault, Shot
from plumbline.worker.processes import die_with

SUITES = Path(__file__).resolve().parents[2] / "suites"
CELLS = (
    *("--gpus", "2", "--workloads", "mlp,linear-exact", "--precisions", "32"),
    *("--subject", "torch", "--backends", "none,ddp"),
)
"""Selects four small cells."""

PATIENCE = 240.0
"""The time limit for a pytest run in seconds, also on a busy machine."""

NO_END = -999
"""The exit code of a pytest that was killed after the time limit."""

_SHOWN = re.compile(r"test_cell\[([^\]]+)\] (PASSED|DEVIATES|FAILED|ERRORED|CRASHED|TIMED_OUT)")


@dataclass(frozen=True)
class Said:
    """The exit code and output of a pytest run."""

    code: int
    text: str

    @property
    def shown(self) -> set[str]:
        """The ids of the cells whose verdicts it printed."""
        return {cell for cell, _ in _SHOWN.findall(self.text)}


class Project:
    """A folder with the suites, in which pytest runs as users run it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(SUITES, folder / "suites", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
        self.reports = folder / "reports"

    def begin(self, *arguments: str, under: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
        """Start a pytest in a session of its own that ends with this process; ``under`` is a command that runs it."""
        here = os.getpid()
        command = [*under, sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "suites/", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
            preexec_fn=lambda: die_with(here),
        )

    def pytest(self, *arguments: str, under: Sequence[str] = (), **environment: str) -> Said:
        """Run a pytest to its end."""
        return ended(self.begin(*arguments, under=under, **environment))

    def run(self, name: str = "latest") -> list[dict[str, Any]]:
        """The complete lines of a run's results, without a torn last one."""
        text = (self.reports / name / "results.jsonl").read_bytes()
        return [json.loads(line) for line in text.split(b"\n")[:-1] if line]


def ended(process: subprocess.Popen[bytes], patience: float = PATIENCE) -> Said:
    """Wait for a pytest's end."""
    try:
        text, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Said(NO_END, text.decode(errors="replace") + "\nit did not end in time")
    return Said(process.returncode, text.decode(errors="replace"))


def cells_of(records: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of the cells that have a result."""
    return {record["cell"] for record in records if record["type"] == "result"}


def sentence(said: Said, *words: str, code: int | None = None) -> Shot:
    """Check for a pattern, in a run that ended by itself without a traceback of ours."""
    missing = [word for word in words if not re.search(word, said.text)]
    wrong = [f"no word of {missing}"] if missing else []
    wrong += ["a traceback"] if "INTERNALERROR" in said.text or "Traceback (most recent call last)" in said.text else []
    wrong += [f"exit code {said.code}"] if code is not None and said.code != code else []
    return Shot(not wrong, f"{', '.join(wrong)}: …{said.text[-900:]}" if wrong else words[0])


def until_shown(process: subprocess.Popen[bytes], times: int, words: str = "PASSED") -> str:
    """Read until the words were printed ``times`` times, or the output ends; return the output."""
    assert process.stdout is not None
    text = ""
    while text.count(words) < times:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        if not chunk:
            break
        text += chunk
    return text


def fault(row: int, inject: Any, must: str) -> Fault:
    """Return a fault of a whole run, named like its function."""
    return Fault(inject.__name__.replace("_", "-"), row, must, inject)
