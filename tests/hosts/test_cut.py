"""A broken network between hosts is found within a bounded time, named, and leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from plumbline.core.errors import LaunchError
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, start
from plumbline.launch.launchers.hosts import HostsLauncher
from plumbline.launch.pool import WORKER, LauncherOptions
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.results.run import read_run
from plumbline.trainer.environments import free_port
from plumbline.worker.node_server import EXIT_DISCONNECTED, TOKEN
from plumbline.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

ROOT = Path(__file__).parents[2]
ON_NODES = Path(__file__).parents[1] / "launch" / "subjects" / "on_nodes.py"
SECRET = "a secret that only the test knows"
LONG = 600.0
"""Seconds after which something hangs."""


def all_have_stepped(folder):
    """Return whether each rank of a 2 × 2 cell has taken its first step."""
    return all((folder / f"reached-{rank}").exists() for rank in range(4))


@pytest.fixture
def cable(hosts):
    """The second host's cable; it is reconnected at the end."""
    yield lambda: hosts.pull(1)
    hosts.plug_in(1)


@pytest.fixture
def started(hosts, hosts_pool, cell_of, tmp_path, monkeypatch):
    """Start a 2 × 2 cell that stops after its first step; return it, and its pool."""
    monkeypatch.setenv("PLUMBLINE_TEST_FOLDER", str(tmp_path))

    def started(time_limit):
        pool = hosts_pool(ON_NODES)
        cell = cell_of("mlp", "ddp", "2x2", subject="waits-in-the-middle")
        launched = start(pool, cell, tmp_path / "evidence", Settings(time_limit))
        assert hosts.until(lambda: all_have_stepped(tmp_path))
        return launched, cell, pool

    return started


@pytest.mark.parametrize("time_limit", [LONG, 8.0], ids=["before the limit", "at the limit"])
def test_a_cable_pulled_in_the_middle_names_rank_and_node(hosts, cable, started, tmp_path, time_limit, hosts_pool):
    launched, cell, pool = started(time_limit)
    cable()
    (tmp_path / "go-on").touch()
    trace = launched.wait_for_trace()
    assert trace.seconds < LONG
    findings = judge(TraceAnalysis(trace, WORKLOADS["mlp"], cell))
    assert [finding.check for finding in findings] == ["launch"], "nothing is said of what was computed"
    assert findings[0].outcome.value == "crashed"
    assert findings[0].rank == 2
    assert f"rank 2: its node host-1 ({hosts.address(1)} on eth0) has been silent" in findings[0].message
    assert not pool.alive
    pool.close()
    with pytest.raises(LaunchError, match=r"1 of 2 nodes connected.*host-1 cannot reach the launcher"):
        _ = hosts_pool(ON_NODES).subjects


def test_a_run_whose_cable_is_pulled_goes_on_and_says_of_each_cell_what_was_the_matter(hosts, cable, tmp_path):
    asked = ["--nodes", "2", "--gpus", "2", "--workloads", "mlp,contrastive", "--precisions", "32", "--backends", "ddp"]
    where = ["--launcher", "hosts", "--node-command", hosts.command, "--listen", hosts.launcher]
    where += ["--report-dir", tmp_path, "-k", "2x2"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "suites" / "conformance"]
    run = subprocess.Popen(
        [*pytest_, *asked, *where, "--subject", f"{ON_NODES}::waits-in-the-middle"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PLUMBLINE_TEST_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert hosts.until(lambda: all_have_stepped(tmp_path) or run.poll() is not None)
    assert run.poll() is None, run.communicate()[0]
    cable()
    (tmp_path / "go-on").touch()
    said, _ = run.communicate(timeout=LONG)
    assert run.returncode == 1, said
    found = read_run(tmp_path / "latest")
    assert not found.incomplete, said
    first, second = ([r for r in found.results if r.cell == planned.cell] for planned in found.header.planned)
    assert [(r.check, r.outcome.value, r.rank) for r in first] == [("launch", "crashed", 2)]
    assert "host-1" in first[0].message
    assert [(r.check, r.outcome.value) for r in second] == [("launch", "errored")]
    assert "host-1 cannot reach the launcher" in second[0].message


def test_a_server_behind_a_cut_notices_by_itself_and_ends_its_ranks(hosts, cable, cell_of, tmp_path, monkeypatch):
    """For servers that nothing on this machine controls: started by hand, or by SLURM."""
    monkeypatch.setenv("PLUMBLINE_TEST_FOLDER", str(tmp_path))
    servers = []

    def by_hand(port):
        for node in range(2):
            where = ("--connect", f"{hosts.launcher}:{port}", "--as-node", node, ON_NODES)
            servers.append(hosts.start(node, sys.executable, WORKER, *where, **{TOKEN: SECRET}))
        return []

    pool = RemotePool(str(ON_NODES), 2, by_hand, (hosts.launcher, 0), token=SECRET)
    try:
        cell = cell_of("mlp", "ddp", "2x2", subject="waits-in-the-middle")
        launched = start(pool, cell, tmp_path / "evidence", Settings(LONG))
        assert hosts.until(lambda: all_have_stepped(tmp_path))
        assert len(hosts.processes(1)) >= 3, "a server and two ranks"
        cable()
        assert servers[1].wait(timeout=LONG) == EXIT_DISCONNECTED
        assert not hosts.processes(1)
        assert not launched.wait_for_trace().is_whole
    finally:
        pool.close()
        codes = [server.wait(timeout=LONG) for server in servers]
    assert codes == [EXIT_DISCONNECTED] * 2


SCRIPT = """
    import sys
    from datetime import timedelta
    import torch
    from plumbline import Module, Trainer
    from plumbline.trainer import environments

    environments.LOOPBACK_JOIN_TIMEOUT = timedelta(seconds=6)

    class Line(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
        def forward(self, x):
            return self.layer(x)
        def training_step(self, batch, batch_nb):
            return {"loss": self(batch[0]).sum()}
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(torch.ones(8, 2))
            return torch.utils.data.DataLoader(data, batch_size=2)

    Trainer(gpus=1, num_nodes=2, distributed_backend="ddp", accelerator="cpu", max_epochs=1).fit(Line())
"""


@pytest.mark.parametrize("started_by", ["torchrun", "nobody"])
def test_a_main_address_on_loopback_is_an_error_and_no_hang(hosts, tmp_path, started_by):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    port = free_port()
    running = []
    for node in range(2):
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        if started_by == "torchrun":
            told |= {"RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": str(node)}
        else:
            told |= {"NODE_RANK": str(node)}
        running.append(hosts.start(node, sys.executable, script, **told))
    for process in running:
        said, _ = process.communicate(timeout=LONG)
        assert process.returncode == 1, said
        assert "127.0.0.1 is a loopback address" in said
        assert "set MASTER_ADDR to an address by which they reach the first node" in said


def test_a_main_address_that_all_reach_trains(hosts, tmp_path):
    """The same script, so that the test above is meaningful."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    told = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29511", "PYTHONPATH": str(ROOT)}
    told |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    running = [hosts.start(n, sys.executable, script, RANK=str(n), GROUP_RANK=str(n), **told) for n in range(2)]
    for process in running:
        said, _ = process.communicate(timeout=LONG)
        assert process.returncode == 0, said


def test_a_pool_whose_hosts_are_all_cut_off_leaves_nobody(hosts, cable):
    options = LauncherOptions(nodes=2, node_command=hosts.command, listen=hosts.launcher)
    pool = HostsLauncher(options).pool(str(ON_NODES), None)
    assert pool.subjects
    cable()
    pool.close()
    assert not hosts.processes(1)
