"""A folder in which pytest is run as a user runs it, and what it printed and wrote."""

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
"""What selects four small cells."""

PATIENCE = 240.0
"""Seconds for a whole pytest, also on a machine that has other things to do."""

NO_END = -999
"""The exit code of a pytest that was killed because it came to no end in time."""

_SHOWN = re.compile(r"test_cell\[([^\]]+)\] (PASSED|DEVIATES|FAILED|ERRORED|CRASHED|TIMED_OUT)")


@dataclass(frozen=True)
class Said:
    """How a pytest ended, and what it printed."""

    code: int
    text: str

    @property
    def shown(self) -> set[str]:
        """The ids of the cells whose verdict it showed."""
        return {cell for cell, _ in _SHOWN.findall(self.text)}


class Project:
    """A folder with the suites in it, where pytest is run as a user runs it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(SUITES, folder / "suites", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
        self.reports = folder / "reports"

    def begin(self, *arguments: str, under: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
        """Begin a pytest, in a session of its own, that ends with this process; ``under`` is a command that runs it."""
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
        """Run one to its end."""
        return ended(self.begin(*arguments, under=under, **environment))

    def run(self, name: str = "latest") -> list[dict[str, Any]]:
        """The whole lines of a run's results; one that was torn off at the end is left out."""
        text = (self.reports / name / "results.jsonl").read_bytes()
        return [json.loads(line) for line in text.split(b"\n")[:-1] if line]


def ended(process: subprocess.Popen[bytes], patience: float = PATIENCE) -> Said:
    """Wait for a pytest's end."""
    try:
        text, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        return Said(NO_END, text.decode(errors="replace") + "\nno end was seen")
    return Said(process.returncode, text.decode(errors="replace"))


def cells_of(records: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of the cells that have a result."""
    return {record["cell"] for record in records if record["type"] == "result"}


def sentence(said: Said, *words: str, code: int | None = None) -> Shot:
    """Ask for words, in a run that ends of itself and shows no traceback of ours."""
    missing = [word for word in words if not re.search(word, said.text)]
    wrong = [f"no word of {missing}"] if missing else []
    wrong += ["a traceback"] if "INTERNALERROR" in said.text or "Traceback (most recent call last)" in said.text else []
    wrong += [f"exit code {said.code}"] if code is not None and said.code != code else []
    return Shot(not wrong, f"{', '.join(wrong)}: …{said.text[-900:]}" if wrong else words[0])


def until_shown(process: subprocess.Popen[bytes], times: int, words: str = "PASSED") -> str:
    """Read until some words were printed so often, or all is over; return what was read."""
    assert process.stdout is not None
    text = ""
    while text.count(words) < times:
        chunk = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
        if not chunk:
            break
        text += chunk
    return text


def fault(row: int, inject: Any, must: str) -> Fault:
    """Return a run's fault, named like its function."""
    return Fault(inject.__name__.replace("_", "-"), row, must, inject)
