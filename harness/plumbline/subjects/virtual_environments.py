"""Virtual environments with exact versions of the libraries under test."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from plumbline.core.errors import PlumblineError
from plumbline.subjects.load import SHORT_NAMES

LIBRARIES = {name: adapter.library for name, adapter in SHORT_NAMES.items() if adapter.library is not None}
"""pip's requirement for each subject's library, by the subject's short name. Other subjects come with Plumbline."""

OUTPUT_LINES = 20
"""Maximum number of lines of output in an error."""


class InstallError(PlumblineError):
    """An environment cannot be created."""


@dataclass(frozen=True)
class VirtualEnvironment:
    """An environment for ``subject``, with its library ``requirement`` and a version of ``torch``."""

    subject: str
    requirement: str
    torch: str

    @property
    def folder(self) -> Path:
        """The environment's folder in the user's cache. Subjects of the same library share it."""
        parts = dict.fromkeys((re.sub(r"\[.*\]", "", self.requirement), self.torch))
        return cache_folder() / "-".join(parts).replace("==", "-")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> list[str]:
        """Requirements that pip installs with dependencies. NumPy is there because torch warns if it is missing."""
        library = SHORT_NAMES[self.subject].dependencies or (self.requirement,)
        return list(dict.fromkeys((self.torch, *library, "numpy")))

    @property
    def requirements_alone(self) -> list[str]:
        """Requirements that pip installs afterwards, without dependencies."""
        return [self.requirement] if SHORT_NAMES[self.subject].dependencies else []


def cache_folder() -> Path:
    """Return the folder of all environments, see https://specifications.freedesktop.org/basedir-spec."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbline" / "envs"


def parse_requirement(what: str) -> VirtualEnvironment:
    """Return the environment for ``NAME==VERSION``, with the required version of torch or this interpreter's."""
    name, _, version = (part.strip() for part in what.partition("=="))
    if name not in LIBRARIES:
        if name in SHORT_NAMES:
            raise InstallError(f"{name} comes with Plumbline and needs no installation")
        raise InstallError(f"unknown subject {name!r}; choose from {', '.join(LIBRARIES)}")
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+!]*", version):
        library = re.sub(r"\[.*\]", "", LIBRARIES[name])
        raise InstallError(f"{what}: give a version, as in {name}==1.2.3; `pip index versions {library}` lists them")
    requirement = f"{LIBRARIES[name]}=={version}"
    # A version with a local part (+cpu, +cu130) is found only in the index of that build.
    torch = SHORT_NAMES[name].torch or f"torch=={metadata.version('torch').partition('+')[0]}"
    return VirtualEnvironment(name, requirement, requirement if name == "torch" else torch)


def pip_command(name: str) -> str:
    pip = f"pip install {shlex.quote(LIBRARIES[name])}"
    dependencies = SHORT_NAMES[name].dependencies
    return f"pip install {shlex.join(dependencies)} && {pip} --no-deps" if dependencies else pip


def environments() -> list[tuple[str, Path]]:
    return [(python.parent.parent.name, python) for python in sorted(cache_folder().glob("[!.]*/bin/python"))]


def install(environment: VirtualEnvironment, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Create the environment if it does not exist, and return its interpreter. ``progress`` gets each line of output.

    The environment is built under a temporary name and renamed when it is complete. The scripts in its ``bin`` contain
    the temporary name: use ``python -m`` instead.
    """
    folder = environment.folder
    if environment.python.exists():
        return environment.python
    building = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        progress("python -m venv")
        _run([sys.executable, "-m", "venv", str(building)], environment, progress)
        pip = [str(building / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        _run([*pip, *environment.requirements], environment, progress)
        if environment.requirements_alone:
            _run([*pip, "--no-deps", *environment.requirements_alone], environment, progress)
        if folder.exists() and not environment.python.exists():
            shutil.rmtree(folder)  # the interpreter that created it is gone
        try:
            building.rename(folder)
        except OSError:
            if not environment.python.exists():  # otherwise another process was faster
                raise
    except OSError as error:
        raise InstallError(f"{folder} cannot be created ({error}): set XDG_CACHE_HOME to another folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return environment.python


def _run(command: Sequence[str], environment: VirtualEnvironment, progress: Callable[[str], None]) -> None:
    # The environment must not use this interpreter's paths.
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    last: deque[str] = deque(maxlen=OUTPUT_LINES)
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in filter(str.strip, process.stdout):
            last.append(line.rstrip())
            progress(line.strip())
    if process.returncode:
        what = " ".join(command[1:4])
        errors = [line for line in last if line.startswith("ERROR")] or last
        raise InstallError(
            f"{environment.requirement} could not be installed in {environment.folder}: `python {what}` failed:\n"
            + "\n".join(f"  {_clipped(line)}" for line in errors)
            + f"\n`pip index versions {environment.requirement.partition('==')[0]}` lists the available versions. "
            "pip's configuration decides where it looks."
        )


def _clipped(line: str) -> str:
    # pip lists every version, the newest last.
    return line if len(line) <= 400 else f"{line[:120]} … {line[-270:]}"
