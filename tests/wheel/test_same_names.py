"""The wheel in a project with packages called ``harness``, ``suites`` and ``tests``: each finds its own.

``ci/gate.py`` runs this file before every change.
"""

from __future__ import annotations

import pytest

PACKAGES = ("harness", "suites", "tests")

MODEL = """
import torch


def make():
    return torch.nn.Linear(4, 2)
"""

SCRIPT = """
import harness, suites, tests
import torch
from harness.model import make

assert harness.THEIRS and suites.THEIRS and tests.THEIRS
torch.manual_seed(0)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 2)).backward()
    optimizer.step()
"""

TEST = """
import harness, suites, tests
import pytest
from harness.model import make


def test_each_package_is_the_projects_own():
    assert harness.THEIRS and suites.THEIRS and tests.THEIRS
    assert make().in_features == 4


@pytest.mark.ranks(2)
def test_a_marked_test_has_its_ranks(rank, world_size):
    assert harness.THEIRS
    assert (rank in (0, 1), world_size) == (True, 2)
"""


@pytest.fixture
def project(shell):
    """A shell in such a project."""
    for name in PACKAGES:
        (shell.folder / name).mkdir()
        (shell.folder / name / "__init__.py").write_text("THEIRS = True\n")
    (shell.folder / "harness" / "model.py").write_text(MODEL)
    (shell.folder / "train.py").write_text(SCRIPT)
    (shell.folder / "tests" / "test_theirs.py").write_text(TEST)
    return shell


def test_a_script_that_imports_them_is_checked(project):
    said = project(f"plumbline check -- {project.environment}/bin/python train.py 2>&1")
    assert said.lstrip().startswith("RIGHT:"), said


def test_a_trainer_is_smoke_tested_beside_them(project):
    project("plumbline new-subject my_trainer.py")
    assert "The trainer is right" in project("plumbline smoke my_trainer.py")


@pytest.mark.parametrize("command", ["pytest", "{python} -m pytest"])
def test_the_projects_tests_and_its_marked_ones_pass(project, command):
    python = project.environment / "bin" / "python"
    assert "2 passed" in project(command.format(python=python) + " -p no:cacheprovider")
