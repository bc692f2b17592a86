"""Runs the steps of CI files for users by hand, with a runner's variables; pip installs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
THEIRS = Path(__file__).parent / "their_repository"
RANKS = ROOT / "tests" / "forked_ranks.py"

PROGRAMS = {
    "python": '[ "$2" = pip ] && exit\n[ "$2" = venv ] && mkdir -p "$3/bin" && : > "$3/bin/activate" && exit\n'
    f'exec "{sys.executable}" "$@"',
    "plumbline": f'exec "{sys.executable}" -m plumbline.cli.main "$@"',
    "torchrun": f'exec "{sys.executable}" "{RANKS}" "${{@: -1}}"',
    "buildkite-agent": 'echo "$@" >> annotated.txt\ncat >> annotation.md',
}
"""Programs that the steps call; this ``torchrun`` is faster than the real one, and starts a script on two ranks."""


@dataclass
class Repository:
    """A copy of a user's repository, and the environment of a runner's jobs."""

    folder: Path
    said: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path) -> Repository:
        place, programs = folder / "repository", folder / "programs"
        shutil.copytree(THEIRS, place)
        (place / ".git").mkdir()
        programs.mkdir()
        for name, text in {**PROGRAMS, "python3": PROGRAMS["python"]}.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)
        path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "harness")}
        return cls(place, environment={**os.environ, **path, "CI": "true"})

    def replace(self, file: str, before: str, after: str) -> None:
        text = (self.folder / file).read_text()
        assert before in text
        (self.folder / file).write_text(text.replace(before, after))

    def read(self, file: str) -> str:
        return (self.folder / file).read_text()

    def shell(self, script: str, environment: Mapping[str, str] | None = None) -> int:
        """Run a script like a runner, and return its exit code; ``said`` has its output."""
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.said += done.stdout
        return done.returncode


def run_action(repository: Repository, **given: str) -> list[str]:
    """Run the steps of the composite action; return the names of failed ones."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    values = {f"inputs.{name}": one.get("default", "") for name, one in action["inputs"].items()}
    values |= {f"inputs.{name.replace('_', '-')}": value for name, value in given.items()}
    values |= {"github.action_path": str(ROOT), "steps.check.outcome": "skipped"}
    files = {name: str(repository.folder.parent / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    repository.environment |= {**files, "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(repository.folder)}
    failed: list[str] = []
    for step in action["runs"]["steps"]:
        if "run" not in step or not _is_wanted(step.get("if", "success()"), values, succeeded=not failed):
            continue
        environment = {name: _expanded(value, values) for name, value in step.get("env", {}).items()}
        code = repository.shell(_expanded(step["run"], values), environment)
        values[f"steps.{step.get('id', '')}.outcome"] = "failure" if code else "success"
        failed += [step["name"]] if code else []
    return failed


def gitlab_jobs(**given: str) -> dict[str, Any]:
    """Return the jobs of GitLab's component with these inputs, without jobs that have no command."""
    declared, jobs = yaml.safe_load_all((ROOT / "templates" / "plumbline.yml").read_text())
    values = {f"inputs.{name}": str(one.get("default", "")) for name, one in declared["spec"]["inputs"].items()}
    values |= {f"inputs.{name}": value for name, value in given.items()}

    def interpolated(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: interpolated(one) for name, one in part.items()}
        if isinstance(part, list):
            return [interpolated(one) for one in part]
        return re.sub(r"\$\[\[ ([\w.-]+) \]\]", lambda found: values[found[1]], part) if isinstance(part, str) else part

    every = interpolated(jobs)
    return {name: job for name, job in every.items() if not job.get("rules") or '"" != ""' not in job["rules"][0]["if"]}


def run_gitlab(repository: Repository, job: str, **given: str) -> int:
    jobs = gitlab_jobs(**given)
    ours = {**jobs[jobs[job]["extends"]], **jobs[job]}
    repository.environment |= {"GITLAB_CI": "true", "CI_PROJECT_DIR": str(repository.folder)}
    code = repository.shell("\n".join([*ours["before_script"], *ours["script"]]))
    assert repository.shell("\n".join(ours.get("after_script", [":"]))) == 0, repository.said
    return code


def run_buildkite(repository: Repository, step: str) -> int:
    content = yaml.safe_load((ROOT / "ci" / "your-repository" / "buildkite.yml").read_text())
    (ours,) = [one for one in content["steps"] if one["key"] == step]
    return repository.shell(ours["command"].replace("$$", "$"), {**content["env"], "BUILDKITE": "true"})


def _expanded(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: values[found[1]], text)


def _is_wanted(condition: str, values: Mapping[str, str], *, succeeded: bool) -> bool:
    names = re.compile(r"(?:inputs|steps)\.[\w.-]+")
    written = names.sub(lambda found: repr(values[found[0]]), condition)
    written = written.replace("&&", "and").replace("||", "or").replace("success()", str(succeeded))
    if "success()" not in condition:
        written = f"{succeeded} and ({written})"
    return bool(eval(written))
