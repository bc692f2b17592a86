"""Virtual environments for exact versions of the libraries under test; an installation that fails leaves none."""

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
from plumbline.subjects.short_names import SHORT_NAMES

LIBRARIES = {name: adapter.library for name, adapter in SHORT_NAMES.items() if adapter.library is not None}
"""pip's name of each subject's library, by short name. A subject that is not here comes with Plumbline."""

OUTPUT_LINES = 20
"""Lines of a step's output that are kept for its error."""


class InstallError(PlumblineError):
    """An environment cannot be made."""


@dataclass(frozen=True)
class VirtualEnvironment:
    """An environment for ``subject``: ``requirement`` is its library, ``torch`` the torch it runs on."""

    subject: str
    requirement: str
    torch: str

    @property
    def folder(self) -> Path:
        """Where it lies once it is whole: in the user's cache, subjects of one library in the same."""
        parts = dict.fromkeys((re.sub(r"\[.*\]", "", self.requirement), self.torch))
        return cache_folder() / "-".join(parts).replace("==", "-")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> list[str]:
        """What pip installs with its dependencies. A rank needs NumPy to write its evidence."""
        library = SHORT_NAMES[self.subject].dependencies or (self.requirement,)
        return list(dict.fromkeys((self.torch, *library, "numpy")))

    @property
    def requirements_alone(self) -> list[str]:
        """What pip installs after that, without its dependencies."""
        return [self.requirement] if SHORT_NAMES[self.subject].dependencies else []


def cache_folder() -> Path:
    """Return the folder of all environments: https://specifications.freedesktop.org/basedir-spec."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbline" / "envs"


def parse_requirement(what: str) -> VirtualEnvironment:
    """Return the environment for ``NAME==VERSION``, with this interpreter's version of torch, or that which it needs.

    Raises:
        InstallError: there is no such name, nothing to install for it, or no version.
    """
    name, _, version = (part.strip() for part in what.partition("=="))
    if name not in LIBRARIES:
        if name in SHORT_NAMES:
            raise InstallError(f"{name} comes with Plumbline, in Plumbline's own version: nothing to install")
        raise InstallError(f"there is no subject {name!r} to install; there are {', '.join(LIBRARIES)}")
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+!]*", version):
        library = re.sub(r"\[.*\]", "", LIBRARIES[name])
        raise InstallError(f"{what}: say which version, as in {name}==1.2.3; `pip index versions {library}` lists them")
    requirement = f"{LIBRARIES[name]}=={version}"
    # A local part (+cpu, +cu130) names a build, which is found in its own index only.
    torch = SHORT_NAMES[name].torch or f"torch=={metadata.version('torch').partition('+')[0]}"
    return VirtualEnvironment(name, requirement, requirement if name == "torch" else torch)


def pip_command(name: str) -> str:
    pip = f"pip install {shlex.quote(LIBRARIES[name])}"
    dependencies = SHORT_NAMES[name].dependencies
    return f"pip install {shlex.join(dependencies)} && {pip} --no-deps" if dependencies else pip


def environments() -> list[tuple[str, Path]]:
    return [(python.parent.parent.name, python) for python in sorted(cache_folder().glob("[!.]*/bin/python"))]


def install(environment: VirtualEnvironment, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Make the environment if it is not there yet, and return its interpreter; ``progress`` gets each line of output.

    It is built under a temporary name and renamed when it is complete, so its interpreter can be relied on. The scripts
    beside it name the folder where they were built: use ``python -m`` instead.

    Raises:
        InstallError: a step failed; the message has the end of its output.
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
            shutil.rmtree(folder)  # the interpreter that it was made with is gone
        try:
            building.rename(folder)
        except OSError:
            if not environment.python.exists():  # else another process was faster
                raise
    except OSError as error:
        raise InstallError(f"{folder} cannot be made ({error}): point XDG_CACHE_HOME elsewhere") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return environment.python


def _run(command: Sequence[str], environment: VirtualEnvironment, progress: Callable[[str], None]) -> None:
    # The paths of this interpreter must not be found in the environment.
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
            f"{environment.requirement} could not be installed in {environment.folder}: `python {what}` said\n"
            + "\n".join(f"  {_clipped(line)}" for line in errors)
            + f"\nWhich versions there are, says `pip index versions {environment.requirement.partition('==')[0]}`; "
            "where pip looks, its own settings say."
        )


def _clipped(line: str) -> str:
    """Return a long line without its middle: pip lists every version that there is, the newest ones last."""
    return line if len(line) <= 400 else f"{line[:120]} … {line[-270:]}"
