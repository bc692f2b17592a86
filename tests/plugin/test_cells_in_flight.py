"""Cells are trained and judged before their tests start, without changing the run's records."""

from __future__ import annotations

import os

import psutil
import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.engine.cells_in_flight import JudgeProcess
from plumbline.engine.examine import Examined
from plumbline.pytest_plugin import session

PASSED = Examined((Finding("gradients", Outcome.PASSED, "right"),), 1.0)
HERE = os.getpid()


def of_another_process():
    return Examined((Finding("gradients", Outcome.PASSED, str(os.getpid() != HERE)),), 1.0)


def dies_in_a_fork():
    if os.getpid() != HERE:
        os._exit(3)
    return PASSED


def raises():
    raise ArithmeticError(os.getpid())


def test_a_trace_is_judged_in_another_process():
    assert JudgeProcess(of_another_process).wait().findings[0].message == "True"


def test_a_trace_whose_judge_died_is_judged_in_this_process():
    assert JudgeProcess(dies_in_a_fork).wait() == PASSED


def test_what_a_judge_raises_is_raised_in_this_process():
    with pytest.raises(ArithmeticError, match=str(HERE)):
        JudgeProcess(raises).wait()


@pytest.mark.usefixtures("kept_pools")
def test_records_do_not_depend_on_the_number_of_judges(project, monkeypatch):
    asked = ("--gpus", "2", "--workloads", "mlp,checkpoint,uneven", "--backends", "none,ddp")
    subject = ("--subject", project.trainer("doubled.py", factor="2"))
    found = []
    for judges in (0, 3):
        monkeypatch.setattr(session, "number_of_judges", lambda judges=judges: judges)
        project.pytest(*asked, *subject, "--report-dir", f"with-{judges}")
        results = project.run_in(f"with-{judges}").results
        found.append([(line["cell"], line["check"], line["outcome"], line["cause"]) for line in results])
    assert found[0] == found[1]
    assert len(found[0]) > 20


@pytest.mark.usefixtures("kept_pools")
def test_a_run_that_ends_early_leaves_no_process_and_its_rest_can_be_resumed(project, monkeypatch):
    monkeypatch.setattr(session, "number_of_judges", lambda: 2)
    asked = ("--gpus", "2", "--workloads", "mlp,uneven", "--backends", "none,ddp", "--precisions", "32")
    subject = ("--subject", project.trainer("doubled.py", factor="2"))
    before = {child.pid for child in psutil.Process().children()}
    project.pytest(*asked, *subject, "-x")
    servers = [child for child in psutil.Process().children() if child.pid not in before]
    assert all("worker" in " ".join(server.cmdline()) for server in servers), "a pool is kept, and nothing else"
    assert not [rank for server in servers for rank in server.children()]
    recorded = {line["cell"] for line in project.run.results}
    planned = len(project.run.lines[0]["planned"])
    assert len(recorded) < planned, "the first wrong cell ended the run"

    project.pytest(*asked, *subject, "--resume")
    assert len({line["cell"] for line in project.run.results}) == planned
