"""Finds the suites, and makes commands for messages that work in the current folder. Standard library only."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from plumbline.core.errors import PlanError

PERFORMANCE = "performance"
SUITES = ("conformance", PERFORMANCE, "detection")
"""The suites by name. The first one is the default."""

MODULES = {"plumbline": "plumbline.cli.main", "pytest": "pytest"}
"""The programs in messages, and their modules."""


def suites() -> Path:
    """Return the folder of the suites: ``suites/`` in a checkout, or its copy beside an installed package."""
    beside, checkout = Path(__file__).resolve().parents[2:4]
    return checkout / "suites" if (checkout / "pyproject.toml").is_file() else beside / "plumbline_suites"


def pytest_arguments(words: Sequence[str]) -> list[str]:
    """Return pytest's arguments for the words of ``plumbline run``: names of suites, then pytest's options.

    pytest reads the suites' settings and ``conftest.py``, and not those of the current project. Reports and pytest's
    cache go to the current folder.
    """
    names = list(takewhile(lambda word: not word.startswith(("-", "@")), words))
    for name in names:
        if name not in SUITES:
            close = difflib.get_close_matches(name, SUITES, 1)
            raise PlanError(
                f"unknown suite {name!r}: {f'did you mean {close[0]}? ' if close else ''}choose from "
                f"{', '.join(SUITES)}; put pytest's options after the suites"
            )
    folder = suites()
    if not folder.is_dir():
        raise PlanError(f"the suites are missing from {folder}: reinstall Plumbline")
    # An earlier version may have left an entry point of the name that is disabled here.
    settings = ["-c", str(folder / "plumbline.ini"), "-p", "no:plumbline", "-p", "plumbline.pytest_plugin.plugin"]
    if PERFORMANCE not in names:
        settings += ["-p", "no:benchmark"]  # it would create a folder here
    here = ["-o", f"cache_dir={Path.cwd() / '.pytest_cache'}", "--report-dir", "reports"]
    paths = [str(folder / name) for name in names or SUITES[:1]]
    return [*settings, *here, *paths, *words[len(names) :]]


def command(*words: str) -> str:
    """Return a shell command for the current folder that uses this interpreter's environment."""
    return shlex.join([*program(words[0]), *words[1:]]) if words else ""


def program(name: str) -> list[str]:
    """Return the words that start a program of this interpreter's environment from the current folder.

    That is its name if ``PATH`` finds it, or else its path. A program without a script is run as a module. Other
    programs are returned unchanged.
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
    """Return the words of a command that runs a suite in the current folder.

    ``suite`` is the suite's folder, by default that of the conformance suite.
    """
    folder = suite or suites() / SUITES[0]
    if folder.parent != suites():
        return [*program("pytest"), os.path.relpath(folder), *words]
    if Path("suites").resolve() == suites():
        return [*program("pytest"), f"suites/{folder.name if suite else ''}", *words]
    named = [] if folder.name == SUITES[0] else [folder.name]
    return [*program("plumbline"), "run", *named, *words]
