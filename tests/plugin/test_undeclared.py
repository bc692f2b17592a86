"""What a subject does not declare is not a test: it is recorded, counted in one line, and shown on request."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("kept_pools")

ASKED = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32,bf16")
LINE = "*1 cell skipped: mine does not claim to support it (backend dp: 1); --show-unsupported lists them*"


def outcomes_of(result):
    return {kind: count for kind, count in result.parseoutcomes().items() if kind not in ("warnings", "warning")}


def unsupported(run):
    return {one["cell"] for one in run.results if one["outcome"] == "unsupported"}


def test_it_is_counted_in_one_line_and_recorded_with_what_it_lacks(project):
    result = project.pytest(*ASKED, "--subject", project.trainer("mine.py", backends=("ddp",)))
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 2, "deselected": 6}
    result.stdout.fnmatch_lines(
        ["6 cells skipped: mine does not claim to support them (backends none, dp: 4; precision bf16: 2); --show-*"]
    )
    assert "mine: dp" not in result.stdout.str()
    run = project.run
    assert len(unsupported(run)) == 6
    found = next(one for one in run.results if one["cell"] == "mine-mlp-dp-1x2-32")
    assert found["check"] == "declared"
    assert found["message"] == "mine does not declare backend 'dp'"
    assert found["undeclared"] == ["backend dp"]
    assert "--cell mine-mlp-dp-1x2-32" in found["reproduce"]
    assert run.footer["cells"] == {"passed": 2, "unsupported": 6}
    assert not unsupported(run) & {cell["cell"] for cell in run.lines[0]["planned"]}
    assert "| `mine: not declared: backends none, dp; precision bf16` | 0/0 (6 unsupported) |" in run.table


def test_it_is_shown_on_request(project):
    result = project.pytest(*ASKED, "--show-unsupported", "--subject", project.trainer("mine.py", backends=("ddp",)))
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 2, "unsupported": 6}
    result.stdout.fnmatch_lines(["*mine: dp, 2 gpus, 32*"])
    assert len(unsupported(project.run)) == 6


def test_who_names_a_cell_is_told_of_that_one(project):
    project.trainer("mine.py", backends=("ddp",))
    cell = "suites/conformance/test_conformance.py::test_cell[mine-mlp-dp-1x2-32]"
    result = project.pytest(*ASKED, "--subject", "mine.py", "-rs", suites=(cell,))
    assert result.ret == 0
    assert outcomes_of(result) == {"unsupported": 1}
    assert unsupported(project.run) == {"mine-mlp-dp-1x2-32"}


def test_only_what_was_selected_is_counted(project):
    project.trainer("mine.py")
    result = project.pytest(*ASKED, "-k", "1x2 and not bf16", "--subject", "mine.py")
    assert outcomes_of(result) == {"passed": 1, "deselected": 7}
    result.stdout.fnmatch_lines([LINE])
    assert unsupported(project.run) == {"mine-mlp-dp-1x2-32"}


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_where_nothing_is_left_it_is_said_why(project, xdist):
    project.trainer("mine.py")
    asked = ("--gpus", "2", "--workloads", "mlp", "--backends", "dp", "--precisions", "32", "--subject", "mine.py")
    result = project.pytest(*asked, *xdist, fresh=bool(xdist))
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(
        ["*Nothing to run: 1 cell skipped: mine does not claim to support it (backend dp: 1); --show-*"]
    )
    assert not list(project.root.glob("reports/*"))


@pytest.mark.parametrize(
    "more",
    [(), ("--collect-only",), ("--show-unsupported",), ("-n", "1")],
    ids=" ".join,
)
def test_where_no_cell_is_planned_it_is_said(project, more):
    project.trainer("mine.py")
    asked = ("--gpus", "2", "--workloads", "mlp", "--backends", "ep", "--precisions", "32", "--subject", "mine.py")
    result = project.pytest(*asked, *more, suites=("suites/conformance",), fresh="-n" in more)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["Nothing to run: no cell matches these options. Change --backends, *"])
    assert "INTERNALERROR" not in result.stdout.str()
    assert not list(project.root.glob("reports/*"))


def test_two_workers_leave_out_what_one_process_does(project):
    project.trainer("mine.py")
    result = project.pytest(*ASKED, "-k", "1x2 and not bf16", "-n", "2", "--subject", "mine.py", fresh=True)
    assert outcomes_of(result) == {"passed": 1}
    result.stdout.fnmatch_lines([LINE])
    assert unsupported(project.run) == {"mine-mlp-dp-1x2-32"}
    assert project.run.footer["cells"] == {"passed": 1, "unsupported": 1}


def test_a_trainer_that_cannot_be_timed_leaves_no_rows_of_conformance(project):
    project.trainer("mine.py")
    arguments = ("--gpus", "2", "--workloads", "perf-mlp", "--precisions", "32", "--subject", "mine.py", "-k", "1x2")
    result = project.pytest(*arguments, "--launches", "3", suites=("suites/performance",), fresh=True)
    assert result.ret == 0
    result.stdout.fnmatch_lines([LINE])
    run = project.run
    assert unsupported(run) == {"mine-perf-mlp-dp-1x2-32"}
    assert "not declared" not in run.table
