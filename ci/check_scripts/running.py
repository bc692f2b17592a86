"""Copies a script of the corpus into a temporary folder and runs it there, plainly or under a command such as check."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from published import COMMITS
from script import HERE, REWRITTEN, Script
from verdict import Verdict, read_verdict

LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "fabric": ["-c", "from lightning.fabric.cli import _main; _main()"],
    "deepspeed": ["-m", "deepspeed.launcher.runner"],
}
"""Commands that users type, and their modules: an interpreter may have the module without the command."""

STAND_INS = HERE / "stand_ins"
"""Our replacements for packages that cannot be installed: a folder for each, put on the path."""

JUDGING = 120
"""Seconds that check may take beyond the script's time limit."""


class CannotRunError(Exception):
    """The script cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Ran:
    """One run of a script.

    Attributes:
        code: the exit status, or None after a timeout.
        seconds: from start to end.
        losses: the losses that each rank differentiated, with all digits.
        output: what it printed.
        verdict: check's verdict, or None without one.
    """

    code: int | None
    seconds: float
    losses: dict[str, tuple[str, ...]]
    output: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Placed:
    """A script in a folder of its own, ready to run with an interpreter. Every run uses a new copy."""

    script: Script
    folder: Path
    python: str
    limit: float

    @property
    def original(self) -> Path:
        """The folder that every run copies."""
        return self.folder / "original"

    def run(self, before: tuple[str, ...] = ()) -> Ran:
        """Run the script, with the arguments ``before`` in front of its command."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            copied, private = Path(name) / "copy", Path(name) / "private"
            shutil.copytree(self.original, copied)
            environment = self._environment(copied / self.script.folder, private)
            command = [*before, *shlex.split(self.script.command)]
            began = time.monotonic()
            code, output = execute(command, copied / self.script.folder, environment, private / "output", self.limit)
            seconds = time.monotonic() - began
            found = {file.stem: tuple(file.read_text().split()) for file in sorted((private / "losses").iterdir())}
        return Ran(code, seconds, found, output)

    def check(self, steps: int) -> Ran:
        """Run the script under check."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            file = Path(name) / "verdict.json"
            command = str(Path(sys.executable).with_name("plumbline"))
            options = ("--steps", str(steps), "--time-limit", str(self.limit), "--json", str(file))
            ran = replace(self, limit=self.limit + JUDGING).run((command, "check", *options, "--"))
            return replace(ran, verdict=read_verdict(file) if file.exists() else None)

    def _environment(self, at: Path, private: Path) -> dict[str, str]:
        """Return the environment of a run in ``at``; files for us go to ``private``."""
        for new in ("bin", "losses"):
            (private / new).mkdir(parents=True)
        for name, words in LAUNCHERS.items():
            launcher = private / "bin" / name
            launcher.write_text(f'#!/bin/sh\nexec {shlex.join([self.python, *words])} "$@"\n')
            launcher.chmod(0o755)
        paths = [HERE / "losses", *(STAND_INS / need for need in self.script.needs if (STAND_INS / need).is_dir())]
        own = self.script.environment
        paths += [at / path for path in own.get("PYTHONPATH", "").split(":") if path]
        return clean_environment() | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(private / "hub"),
            "TOKENIZERS_PARALLELISM": "false",
            "CHECK_SCRIPTS_LOSSES": str(private / "losses"),
            **own,
            "PATH": f"{private / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, paths)),
        }


def interpreter(script: Script, candidates: tuple[str, ...]) -> str:
    """Return the first interpreter that has the modules a script needs."""
    if "slurm" in script.needs and "SLURM_CONF" not in os.environ:
        raise CannotRunError('needs a cluster: eval "$(ci/slurm_cluster.sh up)"')
    needs = tuple(need for need in script.needs if need != "slurm" and not (STAND_INS / need).is_dir())
    for python in candidates:
        if all(has(python, need) for need in needs):
            return python
    raise CannotRunError(f"needs {', '.join(needs)}: pass an interpreter that has them with --python")


@cache
def has(python: str, module: str) -> bool:
    """Return whether an interpreter has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, env=clean_environment()).returncode == 0


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables that point Python at this project."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PLUMBLINE", "VIRTUAL"))
    }


def prepare(script: Script, folder: Path, checkouts: Path | None, python: str, limit: float = 300) -> Placed:
    """Put a script and its data into ``folder``, ready to run."""
    original = folder / "original"
    original.mkdir()
    if script.source == REWRITTEN:
        name = next(word for word in shlex.split(script.command) if word.endswith(".py"))
        (original / name).write_bytes((HERE / "scripts" / name).read_bytes())
    else:
        check_out(script, original, checkouts)
    at = original / script.folder
    for name, pattern, text in script.changes:
        changed, count = re.subn(pattern, text, (at / name).read_text(encoding="utf-8"))
        if not count:
            raise CannotRunError(f"{name} has no match for {pattern!r}")
        (at / name).write_text(changed, encoding="utf-8")
    if script.data:
        environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [python, str(HERE / "data.py"), *script.data], cwd=at, env=environment, check=True, capture_output=True
        )
    return Placed(script, folder, python, limit)


def check_out(script: Script, folder: Path, checkouts: Path | None) -> None:
    """Write the files of a script's repository, at the pinned commit, into ``folder``."""
    commit = COMMITS[script.source]
    clone = f"git clone https://github.com/{script.source} {script.source.replace('/', '+')}"
    at = checkouts / script.source.replace("/", "+") if checkouts else None
    if at is None or not at.is_dir():
        raise CannotRunError(f"no checkout of {clone} in the --checkouts folder")
    paths = script.also or (script.folder,)
    command = ["git", "-C", str(at), "archive", commit, *paths]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        examples = ("examples",) if "examples/" in script.command else ()
        raise CannotRunError(f"{at.name} has no {', '.join(paths + examples)} at {commit}: {archive.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def execute(
    command: list[str], at: Path, environment: dict[str, str], file: Path, limit: float
) -> tuple[int | None, str]:
    """Run a command; return its exit status (None after a timeout) and its output."""
    with file.open("w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=at,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = wait(process, limit)
        if code is None:
            end_all(environment["CHECK_SCRIPTS_LOSSES"])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Wait for a process; after a timeout, kill its whole session and return None."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def end_all(folder: str) -> None:
    """Kill the processes whose losses go to ``folder``, because launchers start workers in sessions of their own."""
    mark = f"CHECK_SCRIPTS_LOSSES={folder}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
