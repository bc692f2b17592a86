"""The interpreter that stages run in: an environment of its own, or one on top of an interpreter that has torch.

``--python`` names an interpreter with a torch build for the devices. Use it if nothing can be downloaded, or for
devices other than CUDA, for which constraints.txt has no build. It is not changed: a virtual environment on top of it
sees its packages, this checkout, and the wheels of ``--wheels``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = ".venv-accelerator"

_PROJECT = """
import json, re, sys, tomllib
from importlib import metadata
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
def missing(requirements):
    names = [re.match(r"[A-Za-z0-9_.-]+", one)[0] for one in requirements]
    found = []
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(name)
    return found
print(json.dumps({
    "name": project["name"], "scripts": project.get("scripts", {}),
    "entry_points": project.get("entry-points", {}), "missing": missing(project["dependencies"]),
    "missing_for_tests": missing(project["optional-dependencies"]["dev"]),
    "packages": [path for path in sys.path if path.endswith("-packages")],
    "base": sys.version_info >= (3, 11),
}))
"""

NEEDED_BY_TESTS = ("hypothesis", "pytest-timeout")


class CannotPrepare(Exception):  # noqa: N818
    """The environment could not be created; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """Where stages find ``python``, ``pytest`` and ``plumbline``; ``notes`` go into the report."""

    bin: Path
    variables: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @property
    def python(self) -> str:
        return str(self.bin / "python")


def prepare(root: Path, python: str | None, wheels: Path | None, say: Callable[[str], None]) -> Environment:
    """Return an environment in which the checkout ``root`` is installed.

    Without ``python``, install as the README says, which needs a package index.

    Raises:
        CannotPrepare: the interpreter lacks something, or the installation failed.
    """
    if python is None:
        return _installed(root, say)
    found = shutil.which(python)
    if found is None:
        raise CannotPrepare(f"--python {python}: no such program")
    return _beside(root, os.path.abspath(found), wheels, say)


def _installed(root: Path, say: Callable[[str], None]) -> Environment:
    """Install as the README says, into the lane's own environment; update an existing one."""
    folder = root / FOLDER
    python = folder / "bin" / "python"
    say(f"installing into {FOLDER} (pass an environment that already has torch with --python)")
    try:
        if not (folder / "bin" / "pip").exists():
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], root)
        _run([str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt", "-e", ".[dev]"], root)
    except CannotPrepare as error:
        raise CannotPrepare(
            f"{error}\nWithout a package index, name an interpreter whose torch has the devices: "
            "ci/accelerator --python PYTHON"
        ) from None
    return _environment(folder / "bin", [f"installed with constraints.txt into {FOLDER}"])


def _beside(root: Path, python: str, wheels: Path | None, say: Callable[[str], None]) -> Environment:
    """Create an environment that sees the packages of ``python``, this checkout, and, before them, the wheels."""
    folder = root / FOLDER
    say(f"an environment beside {python}")
    _run([python, "-m", "venv", "--clear", "--without-pip", str(folder)], root)
    own = folder / "bin" / "python"
    extra = folder / "wheels"
    notes = []
    if wheels is not None:
        files = sorted(map(str, wheels.glob("*.whl")))
        if not files:
            raise CannotPrepare(f"--wheels {wheels}: there is no wheel")
        install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(extra)]
        _run([python, *install, *files], root)
        notes.append(f"{len(files)} wheels before the interpreter's own packages")
    packages = _asked(python, root)["packages"]
    site = Path(_output([str(own), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], root).strip())
    lines = [str(root / "harness"), str(extra), *(f"import site; site.addsitedir({path!r})" for path in packages)]
    (site / "plumbline-lane.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    project = _asked(str(own), root)
    _register(root, project, site, folder / "bin", own)
    project = _asked(str(own), root)
    if project["missing"]:
        names = ", ".join(project["missing"])
        raise CannotPrepare(
            f"{python} lacks {names}: put their wheels and those of their dependencies into a folder, and pass it "
            "with --wheels DIR"
        )
    absent = [name for name in project["missing_for_tests"] if name in NEEDED_BY_TESTS]
    if absent:
        notes.append(f"for the project's own tests it lacks {', '.join(absent)}")
    return _environment(folder / "bin", ["the packages of an existing interpreter", *notes])


def _register(root: Path, project: dict[str, Any], site: Path, programs: Path, python: Path) -> None:
    """Do what an installer would: write metadata with the entry points, and the console scripts."""
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    (version,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    info = site / f"{project['name']}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project["entry_points"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()) + "\n"
        for group, entries in groups.items()
        if entries
    )
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    for name, target in {**project["scripts"], "pytest": "pytest:console_main"}.items():
        module, _, function = target.partition(":")
        script = programs / name
        script.write_text(
            f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n", encoding="utf-8"
        )
        script.chmod(0o755)


def _environment(programs: Path, notes: list[str]) -> Environment:
    variables = dict(os.environ)
    variables["PATH"] = f"{programs}{os.pathsep}{variables.get('PATH', '')}"
    variables["VIRTUAL_ENV"] = str(programs.parent)
    variables["PYTHONUNBUFFERED"] = "1"  # so that the log of a killed stage has all that it printed
    variables.pop("PYTHONHOME", None)
    return Environment(programs, variables, notes)


def _asked(python: str, root: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(_output([python, "-c", _PROJECT, str(root / "pyproject.toml")], root))
    return told


def _run(words: list[str], cwd: Path) -> None:
    _output(words, cwd)


def _output(words: list[str], cwd: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, stdin=subprocess.DEVNULL)
    if done.returncode:
        told = (done.stderr or done.stdout).strip()[-1500:]
        raise CannotPrepare(f"{' '.join(words[:5])} … ended with {done.returncode}: {told}")
    return done.stdout
