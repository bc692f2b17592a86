"""``plumbline check`` and the marker ``ranks`` need only torch: ``pip install --no-deps`` suffices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HANG_S = 300
"""No command of these tests takes this long, however busy the machine is."""

ALONE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
for start in range(0, 32, 8):
    loss = nn.functional.mse_loss(model(inputs[start : start + 8]), targets[start : start + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

TRAIN = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
wrapped = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    loss = module(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

FORKED_RANKS = str(Path(__file__).parents[1] / "forked_ranks.py")

MAIN = "import sys; from plumbline.cli.main import main; sys.exit(main())"

MARKED = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_ranks_add_up(rank, world_size):
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert value.item() == 3
    assert world_size == 2
"""


def installed_with(*names):
    """Return these distributions and their requirements, without extras."""
    found, wanted = {}, [*names]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found.values()


@pytest.fixture(scope="session")
def bare_environment(wheel, tmp_path_factory):
    """An environment with the wheel, torch, pytest, and the requirements of these two, as links to ours."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in installed_with("torch", "pytest"):
        tops = {file.parts[0] for file in distribution.files or ()}
        for place in (Path(distribution.locate_file(top)) for top in tops - {"..", "__pycache__"}):
            if place.exists() and not (packages / place.name).exists():
                (packages / place.name).symlink_to(place)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder


@pytest.fixture
def python(bare_environment, tmp_path, monkeypatch):
    """Runs this environment's Python in an empty folder, and returns the result."""
    monkeypatch.setenv("PATH", f"{bare_environment / 'bin'}:/usr/bin:/bin")
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        command = [bare_environment / "bin" / "python", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_S)

    return run


def verdict_in(stderr):
    """Return the verdict on a screen, without its last line, which has durations."""
    answer = re.search(r"^(RIGHT|WRONG|NOT JUDGED)", stderr, re.MULTILINE)
    assert answer, stderr
    return stderr[answer.start() :].rpartition("\n\n")[0]


@pytest.mark.parametrize("name", ["numpy", "pandas", "pydantic", "rich", "safetensors", "scipy", "psutil"])
def test_the_environment_has_none_of_our_requirements(python, name):
    assert "ModuleNotFoundError" in python("-c", f"import {name}").stderr


def test_the_command_line_starts(python):
    done = python("-c", MAIN, "check", "--help")
    assert done.returncode == 0, done.stderr


def test_check_gives_the_verdict_of_a_full_installation(python, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["-c", MAIN, "check", "--", "python", FORKED_RANKS, "train.py"]
    bare = python(*command)
    full = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert (bare.returncode, full.returncode) == (1, 1), bare.stderr
    assert verdict_in(bare.stderr).startswith("WRONG: ")
    assert verdict_in(bare.stderr) == verdict_in(full.stderr)


def test_annotations_and_the_page_need_no_other_library_either(python, tmp_path):
    (tmp_path / "train.py").write_text(ALONE)
    files = ["--github", "--sarif", "check.sarif", "--html", "check.html"]
    done = python("-c", MAIN, "check", *files, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert verdict_in(done.stderr).startswith("RIGHT: ")
    assert json.loads((tmp_path / "check.sarif").read_text())["runs"][0]["results"] == []
    assert "<h1>Right – " in (tmp_path / "check.html").read_text()


def test_json_without_pydantic_is_refused_before_the_training_starts(python, tmp_path):
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = python("-c", MAIN, "check", "--json", "check.json", "--", "python", "train.py")
    assert done.returncode == 4
    assert "--json needs pydantic: pip install pydantic" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_test_with_the_marker_ranks_passes(python, tmp_path):
    (tmp_path / "test_marked.py").write_text(MARKED)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
