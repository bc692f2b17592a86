"""``--launcher ray`` on real raylets: verdicts equal those on one machine, and a lost node is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from plumbline.core.errors import LaunchError
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launchers import find_launcher
from plumbline.launch.launchers import ray as ray_launcher
from plumbline.launch.pool import LauncherOptions
from plumbline.results.run import read_run
from plumbline.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

ROOT = Path(__file__).parents[2]
LONG = 600.0
"""Seconds after which something hangs."""
ON_NODES = Path(__file__).parents[1] / "launch" / "subjects" / "on_nodes.py"
CELLS = ["--nodes", "2", "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "-k", "2x2"]


@pytest.fixture
def ray_pool():
    """Return a pool of two nodes with two devices each for a locator; closed at the end."""
    pools = []

    def pool(locator, gpus=2, nodes=2):
        pools.append(find_launcher("ray", LauncherOptions(nodes, gpus)).pool(str(locator), None))
        return pools[-1]

    yield pool
    for opened in pools:
        opened.close()


def run_of(folder, *words, **variables):
    """Run cells in their own process; return it when it has ended."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "suites" / "conformance"]
    command = [*pytest_, "--report-dir", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


def told_by(run):
    return {(result.coordinates, result.check): (result.outcome, result.cause) for result in run.results}


def test_cells_are_judged_as_on_one_machine_for_the_same_gradients(cluster, ray_pool, warm_pool, cell_of, tmp_path):
    pools = {"ray": ray_pool("reference"), "local": warm_pool("reference")}
    for backend in ("ddp", "ddp2"):
        cell = cell_of("mlp", backend, "2x2", subject="reference")
        traces = [launch(pool, cell, tmp_path / where / backend, Settings(LONG)) for where, pool in pools.items()]
        assert all(trace.is_whole for trace in traces), traces[0].exits
        findings = [judge(TraceAnalysis(trace, WORKLOADS["mlp"], cell)) for trace in traces]
        told = [{one.check: (one.outcome, one.cause) for one in found} for found in findings]
        assert told[0] == told[1]
        for here, there in zip(traces[0].ranks, traces[1].ranks, strict=True):
            for mine, other in zip(here.steps, there.steps, strict=True):
                assert all(torch.equal(mine.gradients[name], other.gradients[name]) for name in other.gradients)


def test_ranks_live_on_their_nodes_and_have_no_secret(cluster, ray_pool, cell_of, tmp_path):
    pool = ray_pool(ON_NODES)
    assert sorted(pool.hosts) == ["node0", "node1"]
    assert launch(
        pool, cell_of("mlp", "ddp", "2x2", subject="says-what-it-was-told"), tmp_path, Settings(LONG)
    ).is_whole
    for rank in range(4):
        said = json.loads((tmp_path / f"rank-{rank}.log").read_text().splitlines()[0])
        assert said["GROUP_RANK"] == str(rank // 2)
        assert said["PLUMBLINE_TOKEN"] is None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert pool.token.encode() not in (process / "cmdline").read_bytes()
        except OSError:
            continue


def test_too_few_nodes_or_devices_are_refused_with_what_there_is(cluster, ray_pool):
    there = r"there are 2 nodes: node\d has 4 CPU, node\d has 4 CPU"
    with pytest.raises(LaunchError, match=rf"3 nodes with 2 CPU each were requested, but only 2 nodes .*: {there}"):
        _ = ray_pool("reference", nodes=3).subjects
    with pytest.raises(LaunchError, match=rf"2 nodes with 5 CPU each were requested, but only 0 nodes .*: {there}"):
        _ = ray_pool("reference", gpus=5).subjects


def test_what_others_hold_is_waited_for_and_then_told(cluster, ray_pool, monkeypatch):
    assert ray_pool("reference", gpus=3).subjects
    monkeypatch.setattr(ray_launcher, "START_TIMEOUT_S", 2.0)
    with pytest.raises(LaunchError, match=r"Ray has not placed 2 nodes with 3 CPU each in 2 s: .*free: 2 CPU"):
        _ = ray_pool("reference", gpus=3).subjects


def test_a_secret_that_is_not_the_cluster_s_is_refused_in_ray_s_words(cluster, ray_pool, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(LaunchError, match=r"(?s)InvalidAuthToken.*cannot connect to Ray's cluster"):
        _ = ray_pool("reference").subjects


def test_two_workers_have_a_group_each(cluster, tmp_path):
    ways = {"local": (), "ray": ("--launcher", "ray", "-n", "2")}
    done = {way: run_of(tmp_path / way, *CELLS, *words) for way, words in ways.items()}
    assert [one.returncode for one in done.values()] == [0, 0], done["ray"].stdout + done["ray"].stderr
    runs = [read_run(tmp_path / way / "latest") for way in ways]
    assert told_by(runs[0]) == told_by(runs[1])
    assert runs[1].header.options["launcher"] == "ray"


def test_a_third_worker_finds_no_room(cluster, tmp_path):
    refused = run_of(tmp_path, *CELLS, "--launcher", "ray", "-n", "3")
    assert refused.returncode != 0
    assert "the cluster has room for 2: use a smaller -n" in refused.stdout + refused.stderr


def test_a_run_that_loses_a_node_names_it_and_goes_on(cluster, waiting_folder, tmp_path):
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "suites" / "conformance"]
    asked = ["--launcher", "ray", "--subject", f"{ON_NODES}::waits-in-the-middle", "--report-dir", tmp_path]
    run = subprocess.Popen([*pytest_, *CELLS, *asked], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not all((waiting_folder / f"reached-{rank}").exists() for rank in range(4)):
        assert run.poll() is None, run.communicate()[0]
    cluster.kill(1)
    cluster.bring_back(1)
    (waiting_folder / "go-on").touch()
    said, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, said
    found = read_run(tmp_path / "latest")
    assert not found.incomplete
    messages = [result.message for result in found.results if result.check == "launch"]
    assert len(messages) == 1
    assert "the first attempt failed: the fork server of" in messages[0]
    assert "on node1: it closed the connection" in messages[0]


def test_a_cluster_that_is_started_here_ends_with_its_pool(cell_of, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = set(os.listdir("/tmp"))
    with closing(find_launcher("ray", LauncherOptions(2, 2)).pool("reference", None)) as pool:
        cell = cell_of("mlp", "ddp", "2x2", subject="reference")
        assert launch(pool, cell, tmp_path, Settings(LONG)).is_whole
        folder = pool._scratch.path
        assert os.listdir(folder)
    assert not os.path.exists(folder)
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith(("pl-", "ray"))}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert folder.encode() not in (process / "cmdline").read_bytes()
        except OSError:
            continue
