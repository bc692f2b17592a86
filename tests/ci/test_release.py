"""A release: the version has one place, changes are cut once, and the workflow is valid for GitHub."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from plumbline.machine.software import plumbline_version

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
CHANGES = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-11-22\n\nThe first.\n"


@pytest.fixture
def release(program):
    return program(ROOT / "ci" / "release.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    citation = tmp_path / "CITATION.cff"
    citation.write_text(re.sub(r"^version: .*$", "version: 0.2.0.dev0", citation.read_text(), flags=re.MULTILINE))
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def test_what_is_cut_has_a_version_a_heading_and_notes(release: Any, checkout: Path) -> None:
    assert release.cut(checkout, date(2026, 12, 1)) == "0.2.0"
    assert "\nversion: 0.2.0\n" in (checkout / "CITATION.cff").read_text()
    heading = "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n"
    assert (checkout / "CHANGELOG.md").read_text() == CHANGES.replace("## [Unreleased]\n\n### Added\n", heading)
    assert release.notes(checkout, "v0.2.0") == "### Added\n\n- A thing."
    with pytest.raises(release.ReleaseError, match="nothing under"):
        release.cut(checkout, date(2026, 12, 1))
    with pytest.raises(release.ReleaseError, match=r"the tag is v0\.3\.0, and the version in CITATION\.cff is 0\.2\.0"):
        release.notes(checkout, "v0.3.0")


def test_a_tag_is_refused_where_changes_are_in_no_release(release: Any, checkout: Path) -> None:
    with pytest.raises(release.ReleaseError, match="in no release"):
        release.notes(checkout, "v0.2.0.dev0")


def test_the_version_of_this_checkout_is_between_releases_or_has_a_section(release: Any) -> None:
    (version,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert version not in sections if ".dev" in version else sections[1] == version


def test_what_says_the_version_asks_the_installed_distribution() -> None:
    """tests/wheel tests that it has the version from CITATION.cff."""
    assert plumbline_version() == metadata.version("torch-plumbline")


def test_the_workflow_is_valid_by_github_s_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_a_tag_publishes_and_only_the_job_that_publishes_may_write() -> None:
    content = yaml.safe_load(WORKFLOW.read_text())
    jobs = content["jobs"]
    assert content["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    for job in jobs.values():
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")], "a shell runs no expression"


def test_programs_and_files_that_the_workflow_names_are_there() -> None:
    for name in re.findall(r"\b(?:ci|dist)/[\w.*]+|constraints\.txt", WORKFLOW.read_text()):
        assert name.startswith("dist/") or (ROOT / name).is_file(), name


def test_the_image_has_what_pyproject_names() -> None:
    """The image's folder has no git, and only copied files."""
    (copied,) = re.findall(r"^COPY (pyproject.*) \./$", (ROOT / "ci" / "Dockerfile").read_text(), re.MULTILINE)
    assert {"CITATION.cff", "LICENSE", "README.md"} <= set(copied.split())
