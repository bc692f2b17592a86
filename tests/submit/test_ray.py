"""Ray: each task is a job of the cluster, and the jobs make one run. The launcher ray has tests of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile

import pytest

from plumbline.core.errors import PlanError
from plumbline.launch.launchers import LAUNCHERS
from plumbline.results.run import read_run
from plumbline.submit.engine import FORGOTTEN, EngineError, TaskCommand
from plumbline.submit.engines.ray import RayEngine
from plumbline.submit.follow import Follower
from plumbline.submit.submission import Submission, SubmitRequest, prepare

CLUSTER = """
import sys
import ray

context = ray.init(num_cpus=2, include_dashboard=True, dashboard_host="127.0.0.1", _temp_dir=sys.argv[1])
print(f"http://{context.dashboard_url}", flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def address():
    """Return the address of a single-node cluster that ends with this module's tests; this process has its token."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("needs ray[default]")
    # Ray creates sockets in it, whose paths may have 107 bytes: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder, pytest.MonkeyPatch.context() as environment:
        command = [sys.executable, "-c", CLUSTER, folder]
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            lines = iter(head.stdout.readline, "")
            yield next(line.strip() for line in lines if line.startswith("http"))
            head.stdin.close()
            head.stdout.read()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", sorted({"local", "ray"} & {*LAUNCHERS}))
def test_two_jobs_of_a_cluster_make_one_run(address, tmp_path, launcher):
    words = ("--workloads", "mlp", "--precisions", "32", "--backends", "none,ddp", "-p", "no:cacheprovider")
    engine = RayEngine(address, {"OMP_NUM_THREADS": "1"}, launcher)
    request = SubmitRequest(engine, nodes=1, gpus=2, tasks=2, accelerator="cpu", report_dir=tmp_path, pytest=words)
    submission = prepare(request, ("plumbline", "submit"))
    submission.save()
    told = []
    run = Follower(submission, told.append).follow()
    assert run is not None, told
    assert not run.incomplete
    assert {result.outcome.value for result in read_run(run.path).results} == {"passed"}
    states = engine.states(submission, submission.jobs())
    assert {state.name for state in states.values()} == {"SUCCEEDED"}
    assert engine.states(submission, {0: "nobody"}).get(0, FORGOTTEN) is FORGOTTEN


@pytest.mark.nightly
def test_who_has_another_token_is_told_in_ray_s_words(address):
    asking = (
        "import sys; from plumbline.submit.engines.ray import RayEngine; RayEngine(sys.argv[1]).states(None, {0: ''})"
    )
    # Another process, because Ray reads its token only once.
    command = [sys.executable, "-c", asking, address]
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"EngineError: Ray's cluster at {address}: Authentication failed" in done.stderr


def test_a_cluster_that_cannot_be_asked_is_said():
    missing = importlib.util.find_spec("ray") is None
    error, said = (PlanError, r"pip install 'ray\[default\]'") if missing else (EngineError, r"http://127\.0\.0\.1:9")
    with pytest.raises(error, match=said):
        RayEngine("http://127.0.0.1:9").states(None, {0: "job"})


def test_what_is_sent_could_be_sent_by_hand(tmp_path):
    engine = RayEngine("http://head:8265")
    work = TaskCommand(2, 8, "auto", ("-q",), ("reference",), (), "/env/bin/python", "/my folder", "/suites")
    submission = Submission(tmp_path / "run", ("plumbline",), work, (), ((), ()), engine)
    assert engine.text(submission, "job", [1]) == (
        "ray job submit --no-wait --address http://head:8265 --submission-id job-1 -- env '--chdir=/my folder' "
        f"/env/bin/python -m pytest -q --accelerator auto --launcher ray --report-dir {submission.part(1)} "
        f"@{submission.selection(1)}\n"
    )
    submission.save()
    assert Submission.load(submission.run) == submission
