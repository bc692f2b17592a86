"""``--launcher hosts``: cells with ranks on hosts with their own addresses are judged as on one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, PlanError
from plumbline.core.topology import Topology
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launchers import check_devices_of_nodes, find_launcher
from plumbline.launch.pool import LauncherOptions
from plumbline.results.run import read_run
from plumbline.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

ROOT = Path(__file__).parents[2]
LONG = 600.0
"""Seconds after which something hangs."""
PRETENDS = Path(__file__).parent / "subjects" / "pretends.py"
ON_NODES = Path(__file__).parents[1] / "launch" / "subjects" / "on_nodes.py"
STARTERS = ROOT / "tests" / "launch" / "subjects" / "starters.py"


def findings_of(trace, cell):
    return {finding.check: finding for finding in judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))}


def test_cells_are_judged_as_on_one_machine_for_the_same_gradients(hosts_pool, warm_pool, cell_of, tmp_path):
    pools = {"hosts": hosts_pool("reference"), "local": warm_pool("reference")}
    for backend, workload in (("ddp", "mlp"), ("ddp2", "mlp"), ("ddp2", "contrastive")):
        cell = cell_of(workload, backend, "2x2", subject="reference")
        traces = {
            where: launch(pool, cell, tmp_path / where / backend / workload, Settings(LONG))
            for where, pool in pools.items()
        }
        assert all(trace.is_whole for trace in traces.values()), traces["hosts"].exits
        told = [
            {name: (finding.outcome, finding.cause) for name, finding in findings_of(trace, cell).items()}
            for trace in traces.values()
        ]
        assert told[0] == told[1]
        for here, there in zip(traces["hosts"].ranks, traces["local"].ranks, strict=True):
            for mine, other in zip(here.steps, there.steps, strict=True):
                assert mine.gradients.keys() == other.gradients.keys()
                assert all(torch.equal(mine.gradients[name], other.gradients[name]) for name in mine.gradients)


def test_ranks_know_their_host_and_meet_at_an_address_that_all_reach(hosts, hosts_pool, cell_of, tmp_path):
    pool = hosts_pool(ON_NODES)
    assert pool.hosts == ("host-0", "host-1")
    cell = cell_of("mlp", "ddp", "2x2", subject="says-what-it-was-told")
    assert launch(pool, cell, tmp_path, Settings(LONG)).is_whole
    for rank in range(4):
        said = json.loads((tmp_path / f"rank-{rank}.log").read_text().splitlines()[0])
        assert said["host"] == f"host-{rank // 2}"
        assert said["GROUP_RANK"] == str(rank // 2)
        assert (said["MASTER_ADDR"], said["GLOO_SOCKET_IFNAME"]) == (hosts.launcher, "eth0")


@pytest.mark.parametrize("name", ["spawns", "script"])
def test_a_trainer_that_starts_its_own_ranks_meets_on_the_first_host(hosts_pool, cell_of, tmp_path, name):
    cell = cell_of("mlp", "ddp", "2x2", subject=name)
    trace = launch(hosts_pool(STARTERS), cell, tmp_path, Settings(LONG))
    assert trace.is_whole, (trace.exits, [rank.error for rank in trace.ranks])
    findings = findings_of(trace, cell)
    assert {finding.outcome.value for finding in findings.values()} == {"passed"}, findings


def test_loopback_as_gloo_s_interface_is_refused_with_node_and_interface(hosts_pool, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    said = r"host-0 cannot reach host-1 \(127\.0\.0\.1 on lo\).*GLOO_SOCKET_IFNAME is lo on host-\d"
    with pytest.raises(LaunchError, match=said):
        _ = hosts_pool(ON_NODES).subjects


def test_an_interface_that_is_not_there_is_refused_with_the_node(hosts_pool, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(LaunchError, match=r"host-\d has no network interface eth7"):
        _ = hosts_pool(ON_NODES).subjects


@pytest.mark.parametrize("how", ["no route", "packets get lost"])
def test_hosts_that_cannot_reach_each_other_are_named_before_the_first_cell(hosts, hosts_pool, how):
    if how == "no route":
        breaking = ("route", "add", "blackhole", f"{hosts.address(1)}/32")
        mending = ("route", "del", "blackhole", f"{hosts.address(1)}/32")
    else:
        entry = (hosts.address(1), "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        breaking, mending = ("neigh", "replace", *entry), ("neigh", "del", hosts.address(1), "dev", "eth0")
    hosts.inside(0, *breaking)
    try:
        with pytest.raises(LaunchError, match=rf"host-0 cannot reach host-1 \({hosts.address(1)} on eth0\): "):
            _ = hosts_pool(ON_NODES).subjects
    finally:
        hosts.inside(0, *mending)
    assert hosts_pool(ON_NODES).subjects


def test_other_software_on_one_host_is_refused_with_both_names(hosts_pool, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_TEST_PRETENDS", "software")
    with pytest.raises(
        LaunchError, match=r"host-0 has torch \S+ and Python \S+ and host-1 has torch 2\.4\.0 and Python"
    ):
        _ = hosts_pool(PRETENDS).subjects


def test_uneven_hosts_are_refused_with_their_counts(hosts_pool, monkeypatch):
    monkeypatch.setenv("PLUMBLINE_TEST_PRETENDS", "devices")
    pool = hosts_pool(PRETENDS)
    assert pool.subjects
    fits, uneven = (Cell("pretends", "mlp", "ddp", Topology(2, gpus), "32", "cuda") for gpus in (4, 8))
    check_devices_of_nodes([fits], [pool], oversubscribe=False)
    check_devices_of_nodes([uneven], [pool], oversubscribe=True)
    with pytest.raises(PlanError, match=r"host-0 8, host-1 4. To run, use --gpus 4"):
        check_devices_of_nodes([fits, uneven], [pool], oversubscribe=False)


def test_a_command_without_the_node_s_number_leads_to_no_node():
    for command in (None, "ip netns exec somewhere"):
        with pytest.raises(PlanError, match=r"--node-command 'ip netns exec plumbline-\{node\}'"):
            find_launcher("hosts", LauncherOptions(2, node_command=command))
    with pytest.raises(PlanError, match="--node-command is for --launcher hosts, not for local"):
        find_launcher("local", LauncherOptions(2, node_command="sh {node}"))


def test_a_run_over_hosts_has_the_verdicts_of_one_machine(hosts, tmp_path):
    asked = ["--nodes", "2", "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp,ddp2"]
    ways = {"local": [], "hosts": ["--launcher", "hosts", "--node-command", hosts.command, "--listen", hosts.launcher]}
    told = {}
    for way, words in ways.items():
        (tmp_path / way).mkdir()
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "suites" / "conformance"]
        command = [*pytest_, *asked, *words, "-k", "2x2", "--report-dir", tmp_path / way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        run = read_run(tmp_path / way / "latest")
        told[way] = {(result.coordinates, result.check): (result.outcome, result.cause) for result in run.results}
        assert not run.incomplete
    assert told["hosts"] == told["local"]
    assert {planned.backend for planned in run.header.planned} == {"ddp", "ddp2"}
