"""A run records each subject's versions, and an expectation for one version excuses no other."""

from __future__ import annotations

import platform

import pytest
import torch

SMALL = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp", "-k", "1x2")

SUMMED = """
[[expected]]
check = "gradients"
consequences = "training"
versions = "{versions}"
reason = "its loss is the sum over ranks"
"""


@pytest.fixture
def summed(project):
    """A project with a trainer on top of torch that is wrong in the versions named in a file."""
    project.trainer("summed.py", factor="job.world_size")

    def examine(versions, library='"torch"'):
        (project.root / "suites" / "expectations" / "summed.toml").write_text(SUMMED.format(versions=versions))
        source = (project.root / "summed.py").read_text().replace('"32"])', f'"32"], library={library})')
        (project.root / "summed.py").write_text(source)
        return project.pytest(*SMALL, "--subject", "summed.py")

    project.examine = examine
    return project


def test_the_header_says_on_what_each_subject_ran(summed):
    result = summed.examine(f"=={torch.__version__}")
    assert result.ret == 0
    assert result.parseoutcomes()["known"] == 1
    here = {"torch": torch.__version__, "python": platform.python_version()}
    assert summed.run.lines[0]["subjects"] == {"summed": {"library": "torch", "version": torch.__version__, **here}}


def test_a_known_failure_of_one_version_is_a_failure_of_another(summed):
    result = summed.examine("<2")
    assert result.ret == 1
    assert result.parseoutcomes()["failed"] == 1
    assert all(one["expected"] is None for one in summed.run.results)


def test_versions_of_a_subject_that_names_no_library_are_a_usage_error(summed):
    result = summed.examine("<2", library="None")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*summed.toml, entry 1 names versions*"])
