"""``pytest suites/`` trains cells, shows their outcomes, and leaves a run on disk."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("kept_pools")

SMALL = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32")


def outcomes_of(result):
    return {kind: count for kind, count in result.parseoutcomes().items() if kind not in ("warnings", "warning")}


def test_a_right_trainer_is_green_and_leaves_its_tables(project):
    result = project.pytest(*SMALL, fresh=True)
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 6}
    result.stdout.fnmatch_lines(["*support*", "*passed*", "*simulated*"])
    latest = project.root / "reports" / "latest"
    assert latest.is_symlink()
    for name in ("results.jsonl", "support.md", "support.csv", "metrics.csv"):
        assert (latest / name).stat().st_size > 0, name
    assert project.run.footer is not None
    assert {result["outcome"] for result in project.run.results} == {"passed"}
    assert not project.run.traces, "evidence of what passed is not kept"


DOUBLED = {"none": "passed", "dp": "unsupported", "ddp": "failed"}
"""The outcomes of a trainer that is wrong on two devices only: on one, there is nothing to average."""


def ends_by_backend(run):
    ends = {}
    for (_, _, backend, *_), outcome in run.outcomes.items():
        ends.setdefault(backend, set()).add(outcome)
    return {backend: "failed" if "failed" in found else "".join(found) for backend, found in ends.items()}


def test_a_wrong_trainer_is_red_and_can_be_run_again_alone(project):
    result = project.pytest(*SMALL, "--subject", project.trainer("doubled.py", factor="job.world_size"))
    assert result.ret == 1
    assert outcomes_of(result) == {"passed": 1, "failed": 2, "deselected": 1}
    result.stdout.fnmatch_lines(["*doubled-mlp-ddp-1x2-32 failed*", "*gradients: failed:*", "*reproduce: *pytest *"])
    assert "Traceback" not in result.stdout.str()
    assert ends_by_backend(project.run) == DOUBLED
    assert project.run.traces == ["doubled-mlp-ddp-1x2-32", "doubled-mlp-ddp-2x1-32"]

    failed = next(result for result in project.run.results if result["outcome"] == "failed" and result["gpus"] == 2)
    program, *arguments = shlex.split(failed["reproduce"])
    assert Path(program).name == "pytest"
    assert arguments == [
        "suites/conformance", "--cell", "doubled-mlp-ddp-1x2-32", "--subject", "doubled.py", "--gpus", "2",
    ]  # fmt: skip
    again = project.pytest(suites=arguments)
    assert again.ret == 1
    assert outcomes_of(again) == {"failed": 1}
    assert {(r["backend"], r["num_nodes"], r["gpus"]) for r in project.run.results} == {("ddp", 1, 2)}


def test_two_workers_find_what_one_process_finds(project):
    result = project.pytest(
        *SMALL, "-n", "2", "--subject", project.trainer("doubled.py", factor="job.world_size"), fresh=True
    )
    assert result.ret == 1
    assert outcomes_of(result) == {"passed": 1, "failed": 2}
    result.stdout.fnmatch_lines(["1 cell skipped: doubled does not claim to support it (backend dp: 1); *"])
    assert ends_by_backend(project.run) == DOUBLED
    assert project.run.traces == ["doubled-mlp-ddp-1x2-32", "doubled-mlp-ddp-2x1-32"]
    assert project.run.footer is not None
    result.stdout.fnmatch_lines(["*support*", "*simulated*"])


def test_subjects_stand_side_by_side_and_what_they_do_not_declare_is_unsupported(project):
    project.trainer("a.py", "left")
    project.trainer("b.py", "right")
    asked = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32,bf16", "--subject", "a.py", "--subject", "b.py")
    result = project.pytest(*asked)
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 6, "deselected": 10}
    result.stdout.fnmatch_lines(
        ["10 cells skipped: their subjects do not claim to support them (left 5, right 5); --show-unsupported *"]
    )
    by_subject = {"left": {}, "right": {}}
    for (subject, workload, backend, nodes, gpus, precision, check), outcome in project.run.outcomes.items():
        by_subject[subject][workload, backend, nodes, gpus, precision, check] = outcome
        declared = backend in ("none", "ddp") and precision == "32"
        assert outcome == ("passed" if declared else "unsupported"), (backend, precision, check)
    assert by_subject["left"] == by_subject["right"]
    assert "left" in project.run.table
    assert "right" in project.run.table


def test_a_name_selects_cells(project):
    result = project.pytest(*SMALL, "-k", "ddp and 1x2", "--keep-traces", "--report-dir", "else/where")
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 1, "deselected": 5}
    assert not (project.root / "reports").exists(), "the report directory is the one that was named"
    run = project.run_in("else/where")
    assert {(r["backend"], r["gpus"]) for r in run.results} == {("ddp", 2)}
    assert run.traces == ["reference-mlp-ddp-1x2-32"], "evidence is kept when asked for"
    assert run.footer is not None
    assert "INCOMPLETE" not in run.table, "what was not selected is not missed"


def test_smoke_is_a_few_cells_of_every_backend(project):
    result = project.pytest("--gpus", "4", "-m", "smoke")
    assert result.ret == 0
    assert {r["backend"] for r in project.run.results} == {"none", "auto", "dp", "ddp", "ddp2", "balanced"}
    assert outcomes_of(result)["passed"] <= 12


def test_collecting_trains_nothing(project):
    result = project.pytest(*SMALL, "--collect-only", "-q")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_cell?reference-mlp-none-1x1-32?*", "*test_cell?reference-mlp-ddp-1x2-32?*"])
    assert not (project.root / "reports").exists()


def test_a_run_that_stops_at_the_first_failure_is_shown_as_incomplete(project, monkeypatch):
    temporary = project.root / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    result = project.pytest(*SMALL, "--subject", project.trainer("wrong.py", factor="2"), "-x")
    assert result.ret == 1
    assert outcomes_of(result)["failed"] == 1
    assert "INCOMPLETE" in project.run.table
    result.stdout.fnmatch_lines(["*INCOMPLETE*"])
    left = [name for name in os.listdir(temporary) if name.startswith("plumbline") and not name.endswith(".lock")]
    assert not left, "no evidence is left lying"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backends", "dpp"), "*unknown backend 'dpp': did you mean*'ddp'*"),
        (("--subject", "nowhere.py"), "*--subject nowhere.py: file nowhere.py not found*"),
        (
            ("--report-dir", "pytest.ini/there"),
            "*Cannot create the report directory pytest.ini/there*pytest.ini is not a directory*",
        ),
        (("--cell", "reference-mlp-ddp-1x2-31"), "*unknown cell; did you mean reference-mlp-ddp-1x2-32?*"),
        (("--cell", "nosuch"), "*--cell nosuch: unknown cell; --collect-only lists the cells*"),
        (("--gpus", "100000000"), "*100000000 ranks need *: use fewer*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_a_usage_error_before_anything_runs(project, arguments, said):
    result = project.pytest(*arguments)
    assert result.ret == 4
    result.stderr.fnmatch_lines([said])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert not list(project.root.glob("reports/*"))


def test_options_of_the_suites_that_are_somebody_else_s_too_are_a_usage_error(project):
    (project.root / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--gpus')\n")
    result = project.pytest("-p", "no:plumbline", suites=("conftest.py", "suites/"))
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*defines one of Plumbline's options: *--gpus*plumbline run*"])


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_tests_that_are_no_cells_start_no_pool_and_leave_no_reports(project, workers):
    project.pytester.makepyfile(
        test_mine="""
        import sys

        def test_mine(pytestconfig):
            assert "torch" not in sys.modules
            assert "plumbline.pytest_plugin.session" not in sys.modules
        """
    )
    plugin = ("-p", "no:plumbline", "-p", "plumbline.pytest_plugin.plugin")
    result = project.pytest(*plugin, "--gpus", "2", *workers, suites=("test_mine.py",), fresh=True)
    assert result.ret == 0
    assert outcomes_of(result) == {"passed": 1}
    assert "support" not in result.stdout.str()
    assert not (project.root / "reports").exists()
