"""Where the suites are, and how commands are written in messages so that they work where they are printed.

Standard library only: a message may come from any part of the project.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from plumbline.core.errors import PlanError

PERFORMANCE = "performance"
SUITES = ("conformance", PERFORMANCE, "detection")
"""The suites by name; the first is run where none is named."""

MODULES = {"plumbline": "plumbline.cli.main", "pytest": "pytest"}
"""The programs that messages name, as modules."""


def suites() -> Path:
    """Return the folder of the suites: ``suites/`` in a checkout, its copy beside the package in an installed wheel."""
    beside, checkout = Path(__file__).resolve().parents[2:4]
    return checkout / "suites" if (checkout / "pyproject.toml").is_file() else beside / "plumbline_suites"


def pytest_arguments(words: Sequence[str]) -> list[str]:
    """Return pytest's arguments for the words of ``plumbline run``: names of suites, then pytest's options.

    pytest then reads the suites' own settings instead of those of the project that it is called in, and looks for
    ``conftest.py`` nowhere else. Reports and pytest's cache go to the present folder.

    Raises:
        PlanError: the first words name something that is no suite.
    """
    names = _leading(words)
    for name in names:
        if name not in SUITES:
            close = difflib.get_close_matches(name, SUITES, 1)
            raise PlanError(
                f"there is no suite {name!r}: {f'did you mean {close[0]}? ' if close else ''}plumbline run takes "
                f"{', '.join(SUITES)}, then options of pytest"
            )
    folder = suites()
    if not folder.is_dir():
        raise PlanError(f"the suites are not where they should be, {folder}: install Plumbline again")
    # An installation of an earlier version has left an entry point of the name that is left out here.
    settings = ["-c", str(folder / "plumbline.ini"), "-p", "no:plumbline", "-p", "plumbline.pytest_plugin.plugin"]
    if PERFORMANCE not in names:
        settings += ["-p", "no:benchmark"]  # it leaves a folder where it is called
    here = ["-o", f"cache_dir={Path.cwd() / '.pytest_cache'}", "--report-dir", "reports"]
    paths = [str(folder / name) for name in names or SUITES[:1]]
    return [*settings, *here, *paths, *words[len(names) :]]


def _leading(words: Sequence[str]) -> Sequence[str]:
    first = next((place for place, word in enumerate(words) if word.startswith(("-", "@"))), len(words))
    return words[:first]


def command(*words: str) -> str:
    """Return a command for a shell in the present folder, by a program of this interpreter's environment."""
    return shlex.join([*program(words[0]), *words[1:]]) if words else ""


def program(name: str) -> list[str]:
    """Return the words that start a program of this interpreter's environment from the present folder.

    That is its name where ``PATH`` leads to it, otherwise its path; without a script it is run as a module. What is no
    program of ours is left as it is.
    """
    if name not in MODULES:
        return [name]
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    if Path(sys.argv[0]).name == name:
        folders.insert(0, Path(sys.argv[0]).parent)
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return [_called(folder / name)]
    return [_called(Path(sys.executable)), "-m", MODULES[name]]


def _called(file: Path) -> str:
    found = shutil.which(file.name)
    if found and os.path.samefile(found, file) and os.path.samefile(Path(found).parent, file.parent):
        return file.name
    path = Path(os.path.abspath(file))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def suite_command(*words: str, suite: Path | None = None) -> list[str]:
    """Return the words of a command that runs a suite with further ``words``, in the present folder.

    ``suite`` is the suite's folder, by default the conformance suite's.
    """
    folder = suite or suites() / SUITES[0]
    if folder.parent != suites():
        return [*program("pytest"), os.path.relpath(folder), *words]
    if Path("suites").resolve() == suites():
        return [*program("pytest"), f"suites/{folder.name if suite else ''}", *words]
    named = [] if folder.name == SUITES[0] else [folder.name]
    return [*program("plumbline"), "run", *named, *words]
