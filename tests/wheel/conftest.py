"""The built distributions, and the wheel installed in an environment without this checkout."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_S = 900
"""No command of these tests takes this long, however busy the machine is."""
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """The folder with a wheel and an sdist."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: install the extra 'dev'")
    folder = tmp_path_factory.mktemp("distributions")
    build = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(distributions):
    (file,) = distributions.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel; its requirements are this interpreter's packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for other in (Path(path) for path in sys.path if Path(path).name == "site-packages"):
        for entry in other.iterdir():
            ours = "plumbline" in entry.name or entry.suffix == ".pth"  # an installation of this checkout
            if not ours and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    scripts = configparser.ConfigParser()
    scripts.read(next(packages.glob("torch_plumbline-*.dist-info/entry_points.txt")))
    for name, target in {**scripts["console_scripts"], "pytest": "pytest:main"}.items():
        module, _, function = target.partition(":")
        script = folder / "bin" / name
        script.write_text(SCRIPT.format(python=folder / "bin" / "python", module=module, function=function))
        script.chmod(0o755)
    return folder


class Shell:
    """A user's shell in an empty folder, whose PATH does not contain the environment."""

    def __init__(self, folder, environment):
        self.folder = folder
        self.environment = environment

    def __call__(self, command, *, code=0):
        """Run a command and return its output; its first word may be a program of the environment."""
        program, _, rest = command.partition(" ")
        if program in ("plumbline", "pytest"):
            program = self.environment / "bin" / program
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        done = subprocess.run(
            f"{program} {rest}", shell=True, cwd=self.folder, env=variables,
            capture_output=True, text=True, check=False, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def shell(environment, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return Shell(folder, environment)
