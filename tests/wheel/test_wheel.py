"""An installed wheel works in any folder, by the commands that it prints, and stays out of other pytest runs."""

from __future__ import annotations

import json
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = ("plumbline/", "plumbline_suites/", "torch_plumbline-")
SMALL = "--gpus 2 --workloads mlp --precisions 32"


def test_the_wheel_has_the_suites_and_nothing_that_is_not_used(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(ROOM) for name in names)
    for name in ("conftest.py", "plumbline.ini", "conformance/test_conformance.py", "detection/everybody.py"):
        assert f"plumbline_suites/{name}" in names
    assert "plumbline_suites/performance/yardsticks.py" in names
    assert "plumbline_suites/expectations/lightning.toml" in names
    assert "plumbline_suites/expectations/reproductions/lightning_short_window.py" in names
    assert "plumbline/py.typed" in names
    for template in (ROOT / "harness" / "plumbline").rglob("templates/*"):
        assert str(template.relative_to(ROOT / "harness")) in names
    assert not [name for name in names if "__pycache__" in name or "tests/" in name or "reports/" in name]


def test_the_wheel_says_what_it_is_and_under_which_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {metadata['Version']}\n" in citation


def test_the_sdist_has_what_the_wheel_is_built_from_and_what_a_reader_wants(distributions):
    """No tests: these check the checkout, with ``ci/`` and ``reports/``, not a distribution."""
    (file,) = distributions.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    pages = {f"{name}.md" for name in ("README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")}
    built_from = {"harness", "suites", "docs", "mkdocs.yml", "pyproject.toml", "constraints.txt"}
    assert {name.partition("/")[0] for name in names} == {
        *built_from,
        *pages,
        "LICENSE",
        "CITATION.cff",
        "PKG-INFO",
        ".gitignore",
    }
    assert "suites/expectations/reproductions/lightning_short_window.py" in names
    assert "harness/plumbline/py.typed" in names
    assert "docs/write-an-adapter.md" in names
    assert not [name for name in names if "__pycache__" in name]


def results_of(folder):
    lines = (folder / "reports" / "latest" / "results.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "result"]


def test_every_command_that_is_printed_works_from_an_empty_folder_on(shell):
    said = shell("plumbline new-subject 'my trainer.py'")
    smoke = said.rpartition("  ")[2]
    said = shell(smoke)
    assert "The adapter is right" in said
    run = said.rpartition("  ")[2].strip()
    assert "pytest suites/" not in run
    said = shell(f"{run} {SMALL} -n 2")
    assert "2 passed" in said
    assert {file.name for file in shell.folder.iterdir()} == {
        "my trainer.py",
        "__pycache__",
        "reports",
        ".pytest_cache",
    }
    assert {result["subject"] for result in results_of(shell.folder)} == {"my-trainer"}
    assert not list(shell.environment.rglob("*-pytest-*.pyc")), "pip removes all that is left beside the suites"

    in_the_footer = said.split("report: ")[1].splitlines()[0]
    assert (shell.folder / in_the_footer).is_file()


THEIRS = """
def pytest_addoption(parser):
    for name in ("--gpus", "--nodes", "--seed", "--subject", "--resume"):
        parser.addoption(name)
"""


@pytest.fixture
def project(shell):
    """A project whose pytest has options with the same names as ours, and conflicting settings."""
    (shell.folder / "conftest.py").write_text(THEIRS)
    (shell.folder / "pytest.ini").write_text("[pytest]\naddopts = --gpus theirs\npython_functions = theirs_*\n")
    (shell.folder / "test_theirs.py").write_text(
        "def theirs_are_theirs(pytestconfig):\n    assert pytestconfig.option.gpus == 'theirs'\n"
    )
    return shell


def test_nobody_s_options_collide_and_a_reproduction_runs_just_its_cell(project):
    """A trainer that is wrong on two devices, and an unrelated one beside it."""
    assert "1 passed" in project("pytest -p no:cacheprovider")

    project("plumbline new-subject other.py")
    project("plumbline new-subject wrong.py")
    right = (project.folder / "wrong.py").read_text()
    (project.folder / "wrong.py").write_text(right.replace("loss.backward()", "(loss * 2).backward()"))
    subjects = "--subject other.py --subject wrong.py"
    (project.folder / "pyproject.toml").write_text('[tool.plumbline.run]\nseed = 3\nbackends = "dp"\n')
    asked = f"{subjects} {SMALL} --backends ddp --time-limit 600 --report-dir elsewhere/reports"
    project(f"plumbline run {asked}", code=1)
    before = results_of(project.folder / "elsewhere")
    assert {result["subject"] for result in before} == {"other", "wrong"}
    page = (project.folder / "elsewhere" / "reports" / "latest" / "report.html").read_text()
    assert "pyproject.toml: seed = 3<" in page, "the command line gives the backends"
    (project.folder / "pyproject.toml").unlink()

    cell = "wrong-mlp-ddp-1x2-32"
    command = next(result["reproduce"] for result in before if result["cell"] == cell)
    assert command.endswith(f"plumbline run --cell {cell} --subject wrong.py --gpus 2 --seed 3 --time-limit 600")
    project(command, code=1)
    again = [(found["cell"], found["check"], found["outcome"]) for found in results_of(project.folder)]
    assert again == [(f["cell"], f["check"], f["outcome"]) for f in before if f["cell"] == cell]
