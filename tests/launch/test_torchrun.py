"""``--launcher torchrun``: nodes that a real torchrun started, here or by hand, train cells like one machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from plumbline.core.errors import LaunchError, PlanError
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launchers import find_launcher
from plumbline.launch.launchers.torchrun import TorchrunPool
from plumbline.launch.pool import LauncherOptions
from plumbline.results.run import read_run
from plumbline.trainer.environments import free_port
from plumbline.worker.authenticated_channel import greet
from plumbline.worker.node_server import TOKEN
from plumbline.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
ON_NODES = Path(__file__).parent / "subjects" / "on_nodes.py"
LONG = 600.0
"""Seconds after which something hangs."""


@pytest.fixture(scope="module")
def pool():
    """Two nodes that Plumbline started."""
    opened = TorchrunPool(str(ON_NODES), None, 2)
    yield opened
    opened.close()


def findings_of(trace, cell):
    return {finding.check: finding for finding in judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))}


def what_ranks_were_told(folder, count):
    return [json.loads((folder / f"rank-{rank}.log").read_text().splitlines()[0]) for rank in range(count)]


def test_ranks_are_told_what_torchrun_would_tell_them(pool, cell_of, tmp_path):
    for nodes, gpus in ((2, 2), (1, 2), (2, 1)):
        folder = tmp_path / f"{nodes}x{gpus}"
        trace = launch(
            pool, cell_of("mlp", "ddp", f"{nodes}x{gpus}", subject="says-what-it-was-told"), folder, Settings(LONG)
        )
        assert trace.is_whole, (trace.exits, [rank.error for rank in trace.ranks])
        for rank, told in enumerate(what_ranks_were_told(folder, nodes * gpus)):
            node, local = divmod(rank, gpus)
            assert told["RANK"] == told["ROLE_RANK"] == str(rank)
            assert told["LOCAL_RANK"] == str(local)
            assert told["GROUP_RANK"] == told["NODE_RANK"] == str(node)
            assert told["WORLD_SIZE"] == told["ROLE_WORLD_SIZE"] == str(nodes * gpus)
            assert told["LOCAL_WORLD_SIZE"] == str(gpus)
            assert told["GROUP_WORLD_SIZE"] == str(nodes)
            assert told["TORCHELASTIC_RUN_ID"] not in (None, "plumbline"), "torchrun's own is left as it is"
            assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True", "somebody else holds the store"
            assert told["PLUMBLINE_TOKEN"] is None, "the launcher's secret is nobody's else"


def test_a_rank_that_dies_is_named_and_the_next_cell_finds_its_nodes_ready(pool, cell_of, tmp_path, one_thread):
    cell = cell_of("mlp", "ddp", "2x2", subject="dies-on-the-second-node")
    found = findings_of(launch(pool, cell, tmp_path / "dies", Settings(LONG)), cell)["launch"]
    assert (found.outcome.value, found.rank) == ("crashed", 2)
    cell = cell_of("mlp", "ddp", "2x2", subject="says-what-it-was-told")
    assert launch(pool, cell, tmp_path / "next", Settings(LONG)).is_whole


@pytest.fixture
def by_hand(monkeypatch):
    """Create pools that wait for nodes started by hand, all with one launcher; and start such nodes as they say."""
    place = ("127.0.0.1", free_port())
    said, pools, agents = [], [], []
    launcher = find_launcher("torchrun", LauncherOptions(2, rendezvous=f"{place[0]}:{place[1]}", notify=said.append))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    class ByHand:
        def pool(self, locator=ON_NODES):
            pools.append(launcher.pool(str(locator), None))
            return pools[-1]

        def start(self, change=lambda command: command):
            """Run the launcher's last command on a node; it may be changed first."""
            command = change(re.search(rf"^ +({TOKEN}=.*)$", said[-1], re.MULTILINE)[1])
            agents.append(
                subprocess.Popen(
                    f"exec env {command}", shell=True, cwd=ROOT, env=os.environ | {"PATH": path},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
            return agents[-1]

    made = ByHand()
    made.said, made.place = said, place
    yield made
    for pool in pools:
        pool.close()
    # Nodes that received the end message exit together; others would retry for a while.
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=10)
    for agent in agents:
        agent.terminate()
    for agent in agents:
        agent.communicate(timeout=LONG)


def test_nodes_started_by_hand_train_and_come_back_after_one_was_lost(
    by_hand, cell_of, tmp_path, monkeypatch, one_thread
):
    monkeypatch.setenv("PLUMBLINE_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv(TOKEN, "a secret of the user's")
    pool = by_hand.pool()
    assert "for 2 nodes" in by_hand.said[0]
    assert f'{TOKEN}="${TOKEN}" torchrun --nnodes 2 --nproc-per-node 1' in by_hand.said[0], "it is not shown"
    assert "--max-restarts 3 -m plumbline.worker --connect" in by_hand.said[0]
    first, second = by_hand.start(), by_hand.start()
    cell = cell_of("mlp", "ddp", "2x2", subject="takes-its-node-along-once")
    with pytest.raises(LaunchError, match="it closed the connection"):
        launch(pool, cell, tmp_path / "lost", Settings(LONG))
    assert not pool.alive
    pool.close()
    pool = by_hand.pool()
    trace = launch(pool, cell, tmp_path / "again", Settings(LONG))
    assert trace.is_whole, (trace.exits, [rank.error for rank in trace.ranks])
    assert {finding.outcome.value for finding in findings_of(trace, cell).values()} == {"passed"}
    pool.close()
    assert [agent.wait(timeout=LONG) for agent in (first, second)] == [0, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.replace("--nproc-per-node 1", "--nproc-per-node 2"), "2 processes were started there"),
        (
            lambda c: c.replace("--nnodes 2", "--nnodes 1"),
            "was started as one of 1 nodes, but Plumbline runs with 2",
        ),
        (lambda c: re.sub(r"'\$\{GROUP_RANK\}'", "1", c), "both have the number 1"),
    ],
    ids=["a process a gpu", "alone", "one number for two"],
)
def test_nodes_started_otherwise_than_said_are_refused(by_hand, change, said):
    pool = by_hand.pool()
    by_hand.start(change)
    if "nnodes 1" not in change(by_hand.said[0]):
        by_hand.start(change)
    with pytest.raises(LaunchError, match=said):
        _ = pool.subjects


def test_who_does_not_know_the_secret_is_no_node(by_hand):
    pool = by_hand.pool()
    with socket.create_connection(by_hand.place) as stranger, pytest.raises(ConnectionError, match="the same token"):
        greet(stranger, "guessed", json.dumps({"node": 0, "host": "elsewhere", "at": 0.0}).encode())
    for _ in range(2):
        by_hand.start()
    assert pool.subjects
    pool.close()
    assert by_hand.said[-1] == (
        "1 connection was rejected, the last one from 127.0.0.1: its proof is wrong: it has another token, or "
        "replays a recorded greeting"
    )


def test_what_cannot_be_started_by_hand_is_refused_in_a_sentence(monkeypatch):
    with pytest.raises(PlanError, match=r"2 were given: start a run for each subject"):
        find_launcher("torchrun", LauncherOptions(2, subjects=2, rendezvous="127.0.0.1:29400"))
    with pytest.raises(PlanError, match="a port, such as node0:29400"):
        find_launcher("torchrun", LauncherOptions(2, rendezvous="node0"))
    with pytest.raises(PlanError, match="--rendezvous is for --launcher torchrun, not for slurm"):
        find_launcher("slurm", LauncherOptions(2, rendezvous="127.0.0.1:29400"))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(PlanError, match="does not work with -n"):
        find_launcher("torchrun", LauncherOptions(2, rendezvous="127.0.0.1:29400"))


def test_a_run_by_torchrun_has_the_verdicts_of_one_machine(tmp_path):
    asked = ["--nodes", "2", "--gpus", "2", "--workloads", "mlp", "--precisions", "32", "--backends", "ddp,ddp2"]
    told = {}
    for launcher in ("local", "torchrun"):
        (tmp_path / launcher).mkdir()
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "suites" / "conformance"]
        command = [*pytest_, *asked, "--launcher", launcher, "-k", "2x2", "--report-dir", tmp_path / launcher]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        run = read_run(tmp_path / launcher / "latest")
        told[launcher] = {(result.coordinates, result.check): (result.outcome, result.cause) for result in run.results}
        assert run.header.options["launcher"] == launcher
    assert told["torchrun"] == told["local"]
