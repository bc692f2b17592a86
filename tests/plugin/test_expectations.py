"""Known failures end as expected; an expected failure that does not occur is as loud as a failure."""

from __future__ import annotations

import pytest

from plumbline.cli.main import main

pytestmark = pytest.mark.usefixtures("kept_pools")

SMALL = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "none,ddp", "-k", "1x")

SUMMED = """
measured = "doubled 1.0"

[[expected]]
cell = {{ workload = "mlp", backend = "{backend}" }}
check = "gradients"
consequences = ["training"]
reason = "its loss is the sum over ranks"
"""


@pytest.fixture
def doubled(project):
    """A project with a trainer that is wrong on two devices, and a function that declares where this is known."""
    project.trainer("doubled.py", factor="job.world_size")

    def expect(backend, folder="suites/expectations"):
        (project.root / folder).mkdir(exist_ok=True)
        (project.root / folder / "doubled.toml").write_text(SUMMED.format(backend=backend))

    project.expect = expect
    return project


def test_what_is_known_to_fail_is_shown_as_known_and_is_no_failure(doubled):
    doubled.expect("ddp")
    result = doubled.pytest(*SMALL, "-v", "--subject", "doubled.py")
    assert result.ret == 0
    assert {**result.parseoutcomes(), "warnings": 0} == {"passed": 1, "known": 1, "deselected": 1, "warnings": 0}
    result.stdout.fnmatch_lines(["*doubled-mlp-ddp-1x2-32* KNOWN*", "*K known*", "*1 passed, 1 known*"])
    run = doubled.run
    of_ddp = {one["check"]: one for one in run.results if one["backend"] == "ddp"}
    assert of_ddp["gradients"]["outcome"] == "failed"
    assert of_ddp["gradients"]["expected"]["reason"] == "its loss is the sum over ranks"
    assert of_ddp["gradients"]["expected"]["link"] is None
    assert of_ddp["training"]["expected"] is not None
    assert {one["expected"] is None for check, one in of_ddp.items() if one["outcome"] != "failed"} == {True}
    assert (run.footer["known"], run.footer["cells"]) == (1, {"passed": 1})
    assert run.traces == ["doubled-mlp-ddp-1x2-32"], "evidence of what failed is kept, known or not"
    assert "Expected failures" in run.table


def test_the_known_is_judged_again_as_it_was(doubled, capsys):
    doubled.expect("ddp")
    doubled.pytest(*SMALL, "--subject", "doubled.py")
    capsys.readouterr()
    assert main(["judge", str(doubled.run.path)]) == 0
    assert "1 unchanged, 0 changed" in capsys.readouterr().out


def test_an_unexpected_pass_is_loud_and_so_is_what_nobody_expected(doubled):
    doubled.expect("none", "mine")
    result = doubled.pytest(*SMALL, "--subject", "doubled.py", "--expectations", "mine")
    assert result.ret == 1
    assert result.parseoutcomes()["failed"] == 2
    result.stdout.fnmatch_lines(
        [
            "*doubled-mlp-none-1x1-32 unexpected pass",
            "gradients: passed, but failed was expected: its loss is the sum over ranks",
            "*seen with doubled 1.0*remove this cell, or the entry, from doubled.toml, entry 1*",
            "reproduce: *pytest *--expectations mine*",
            "*doubled-mlp-ddp-1x2-32 failed*",
        ]
    )
    assert doubled.run.footer["unexpected_passes"] == 1
    assert "unexpected pass" in doubled.run.table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "*doubled.toml, entry 1, cell: unknown backend 'dpp'*"),
        (("--expectations", "nowhere"), "*--expectations nowhere: folder not found*"),
    ],
    ids=["misspelt", "nowhere"],
)
def test_what_cannot_be_expected_is_a_usage_error_before_anything_runs(doubled, arguments, said):
    doubled.expect("dpp")
    result = doubled.pytest(*SMALL, "--subject", "doubled.py", *arguments)
    assert result.ret == 4
    result.stderr.fnmatch_lines([said])
    assert not list(doubled.root.glob("reports/*"))
