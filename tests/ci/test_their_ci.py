"""The action and the templates for users' repositories: each gives a verdict, places in files, and reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ci_runner import ROOT, Repository, gitlab_jobs, run_action, run_buildkite, run_gitlab

CHECK = "torchrun --standalone --nproc-per-node 2 train.py"
REPORTS = {"verdict.html", "verdict.json", "verdict.sarif", "verdict.md", "code-quality.json", "badge.svg"}
SMOKE = "--gpus 2 -m smoke -q --workloads mlp"

YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
"""Examples on the page about CI: a workflow of GitHub, then a pipeline of GitLab."""


@pytest.fixture
def theirs(tmp_path: Path) -> Repository:
    return Repository.in_folder(tmp_path)


@pytest.fixture
def wrong(theirs: Repository) -> Repository:
    theirs.replace("trainer.py", "self.loss(self.parallel, batch)", "self.loss(self.model, batch)")
    return theirs


@pytest.fixture
def step_line(theirs: Repository) -> int:
    lines = theirs.read("trainer.py").splitlines()
    return 1 + lines.index("        self.optimizer.step()")


def valid(schema: str, file: Path, *more: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *more, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_valid_by_their_systems_own_schemas(tmp_path: Path) -> None:
    workflow, pipeline = YAML.findall((ROOT / "docs" / "ci.md").read_text())
    written = {
        "workflow.yml": workflow,
        "pipeline.yml": pipeline,
        "jobs.yml": yaml.safe_dump(gitlab_jobs(check=CHECK, adapter="a.py")),
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    valid("github-actions", ROOT / "action.yml")
    valid("github-workflows", tmp_path / "workflow.yml")
    for name in ("jobs.yml", "pipeline.yml"):
        valid("gitlab-ci", tmp_path / name, "--data-transform", "gitlab-ci")
    valid("buildkite", ROOT / "ci" / "your-repository" / "buildkite.yml")


def test_the_examples_use_inputs_that_there_are() -> None:
    workflow, pipeline = map(yaml.safe_load, YAML.findall((ROOT / "docs" / "ci.md").read_text()))
    (job,) = workflow["jobs"].values()
    (step,) = [one for one in job["steps"] if "/plumbline@" in one.get("uses", "")]
    assert step["with"].keys() <= yaml.safe_load((ROOT / "action.yml").read_text())["inputs"].keys()
    declared = next(yaml.safe_load_all((ROOT / "templates" / "plumbline.yml").read_text()))
    assert pipeline["include"][0]["inputs"].keys() <= declared["spec"]["inputs"].keys()


def test_the_action_passes_a_right_script(theirs: Repository) -> None:
    assert run_action(theirs, check=CHECK, install="touch installed") == [], theirs.said
    assert (theirs.folder / "installed").is_file()
    assert theirs.read("../GITHUB_OUTPUT") == "verdict=right\n"
    assert "RIGHT: 100 % of gradients and updates judged" in theirs.read("../GITHUB_STEP_SUMMARY")
    assert "::error" not in theirs.said
    assert {file.name for file in (theirs.folder / "plumbline-reports" / "check").iterdir()} == REPORTS


def test_the_action_fails_a_wrong_script_at_its_line(wrong: Repository, step_line: int) -> None:
    assert run_action(wrong, check=CHECK) == ["Check the script"], wrong.said
    assert wrong.read("../GITHUB_OUTPUT") == "verdict=wrong\n"
    assert "WRONG: gradients: not synchronised" in wrong.read("../GITHUB_STEP_SUMMARY")
    assert f"\n::error file=trainer.py,line={step_line},title=gradients%3A not synchronised::" in wrong.said


def test_gitlab_s_component_fails_a_wrong_script_at_its_line(wrong: Repository, step_line: int) -> None:
    assert run_gitlab(wrong, "plumbline-check", check=CHECK) == 1, wrong.said
    (problem,) = json.loads(wrong.read("plumbline-reports/code-quality.json"))
    assert problem["check_name"] == "not-synchronised"
    assert problem["location"] == {"path": "trainer.py", "lines": {"begin": step_line}}
    assert {file.name for file in (wrong.folder / "plumbline-reports").iterdir()} == REPORTS
    assert "plumbline-suites" not in gitlab_jobs(check=CHECK)


def test_buildkite_s_pipeline_annotates_a_build_with_a_wrong_script(wrong: Repository, step_line: int) -> None:
    assert run_buildkite(wrong, "plumbline-check") == 1, wrong.said
    assert wrong.read("annotated.txt") == "annotate --style error --context plumbline-check\n"
    annotation = wrong.read("annotation.md")
    assert "WRONG: gradients: not synchronised" in annotation
    assert f"trainer.py, line {step_line}" in annotation


def test_each_runs_the_suites_on_an_adapter(wrong: Repository) -> None:
    """Even if the script is wrong, so that the step before fails."""
    failed = run_action(wrong, check=CHECK, adapter="adapter.py", run_options=SMOKE)
    assert failed == ["Check the script", "Run the suites"], wrong.said
    assert re.search(r"::error file=adapter.py,line=\d+,title=theirs%3A", wrong.said)
    assert "# " in wrong.read("../GITHUB_STEP_SUMMARY")
    given = {"adapter": "adapter.py", "run-options": SMOKE}
    assert run_gitlab(wrong, "plumbline-suites", **given) == 1, wrong.said
    assert json.loads(wrong.read("plumbline-reports/code-quality.json"))[0]["location"]["path"] == "adapter.py"
    assert "not-synchronised" in wrong.read("junit.xml")
