"""A real SLURM cluster of three nodes on this machine, for the session; if that is impossible, a line says why."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbline.launch.launchers.slurm import SlurmPool, address_towards, addresses_of_nodes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "slurm_cluster.sh"
CANNOT_BE_HAD = 3
NODES = 3
HANGS_AFTER = 600.0
"""Seconds after which a command or a cluster hangs, however busy the machine is."""


def cluster_command(*words, **environment):
    """Call the script; return its result."""
    return subprocess.run(
        [SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


class Cluster:
    """A running cluster."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.conf = str(self.folder / "slurm.conf")

    def ask(self, *words, check=True):
        """Run a SLURM command; return its output."""
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANGS_AFTER)
        assert not check or done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
        return done.stdout

    def job(self, *words, nodes=2, tasks=2, wait=True):
        """Run a command on the first node of a new allocation."""
        command = ["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", *map(str, words)]
        if wait:
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS_AFTER)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def idle(self, seconds=HANGS_AFTER):
        """Wait until every node is idle, which means that nothing of a job is left; return whether this happened."""
        return until(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * NODES, seconds
        )

    def processes(self):
        """The current processes of this cluster's jobs."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                variables = (place / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.conf}".encode() in variables and (place / "cmdline").read_bytes():
                    jobs = [v for v in variables if v.startswith(b"SLURM_JOB_ID=")]
                    if jobs and int(place.name) != os.getpid():
                        found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found


def until(holds, seconds=HANGS_AFTER):
    """Wait until ``holds()``; return whether it became true."""
    end = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return true


@pytest.fixture(scope="session")
def cluster():
    """Return the session's cluster; its commands find it by the environment."""
    up = cluster_command("up", "", NODES)
    if up.returncode == CANNOT_BE_HAD:
        pytest.skip(up.stderr.strip().splitlines()[-1])
    assert up.returncode == 0, up.stderr
    folder = re.search(r"PLUMBLINE_CLUSTER=(\S+)", up.stdout)[1]
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "OMP_NUM_THREADS")}
    os.environ.update(SLURM_CONF=f"{folder}/slurm.conf", OMP_NUM_THREADS="1")
    try:
        yield Cluster(folder)
    finally:
        down = cluster_command("down", folder)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        assert down.returncode == 0, down.stderr


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """After each test, the nodes are idle again, and no process of a job is left."""
    yield
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        assert cluster.idle(), cluster.ask("squeue") + cluster.ask("sinfo", "-N", "-o", "%N %T %E")
        assert until(lambda: not cluster.processes()), cluster.processes()


@pytest.fixture
def allocation(cluster, monkeypatch):
    """Put this process in a job of two nodes, as if it had been started there."""
    told = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = re.search(r"job allocation (\d+)", told.stderr)[1]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip())
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "2")
    yield job
    cluster.ask("scancel", job)


@pytest.fixture
def slurm_pool(allocation):
    """Return the pool for a locator over the nodes of the allocation; closed at the end."""
    pools = []

    def pool(locator, python=None):
        pools.append(SlurmPool(str(locator), python, 2, address_towards(addresses_of_nodes())))
        return pools[-1]

    yield pool
    for opened in pools:
        opened.close()


@pytest.fixture(scope="session")
def conformance():
    """The arguments of a pytest over the suites, with small cells only."""
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "suites" / "conformance")]
