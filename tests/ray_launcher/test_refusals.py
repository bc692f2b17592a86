"""What ``--launcher ray`` refuses before anything starts, and the actor of a node's server, tested without Ray."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.errors import PlanError
from plumbline.launch.launchers import find_launcher
from plumbline.launch.launchers import ray as ray_launcher
from plumbline.launch.launchers.ray import DRIVER, find_cluster
from plumbline.launch.pool import LauncherOptions
from plumbline.launch.remote.ray_nodes import NodeServer, name_of, room_for, too_small


def node(number, alive=True, **resources):
    named = {"NodeName": f"node{number}", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "host"}
    return {**named, "Alive": alive, "Resources": resources}


def asked(nodes, groups=1, **resources):
    return argparse.Namespace(nodes=nodes, resources=resources, groups=groups)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        ray_launcher.importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    with pytest.raises(PlanError, match=r"--launcher ray: .* has no Ray\. Install it: .*pip install ray"):
        find_launcher("ray", LauncherOptions(2))


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head", ":6379", "head:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(PlanError, match=r"set it to the address of the cluster's head, HOST:PORT"):
        find_cluster(address)


def test_an_address_where_nobody_answers_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert find_cluster(f"127.0.0.1:{port}")[1] == "127.0.0.1", "the way to it is the way back"
    with pytest.raises(PlanError, match=f"RAY_ADDRESS=127.0.0.1:{port}: no Ray cluster can be reached there"):
        find_cluster(f"127.0.0.1:{port}")


def test_a_cluster_that_is_too_small_is_refused_with_what_there_is():
    cluster = [node(0, CPU=4.0, memory=1e9), node(1, CPU=1.0), node(2, alive=False, CPU=64.0)]
    assert too_small(cluster, asked(1, CPU=4)) is None
    assert too_small(cluster, asked(2, CPU=1)) is None
    said = too_small(cluster, asked(2, CPU=2))
    assert said.startswith("2 nodes with 2 CPU each were requested, but only 1 nodes can provide that: ")
    assert said.endswith("there are 2 nodes: node0 has 4 CPU, node1 has 1 CPU")
    assert too_small(cluster, asked(1, memory=1)) is None, "who launches nothing needs no CPU"
    assert "1 CPU and 8 GPU each were requested, but only 0 nodes" in too_small(cluster, asked(1, CPU=1, GPU=8))


def test_more_processes_than_the_cluster_has_room_for_are_refused():
    cluster = [node(0, CPU=4.0), node(1, CPU=4.0)]
    assert too_small(cluster, asked(2, groups=2, CPU=2)) is None
    said = too_small(cluster, asked(2, groups=3, CPU=2))
    assert "3 times 2 nodes with 2 CPU each were requested" in said
    assert "the cluster has room for 2: use a smaller -n" in said


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_the_room_is_what_is_reached_by_taking_the_emptiest_nodes_first(fits, nodes):
    left, groups = sorted(fits), 0
    while len(left) >= nodes and left[-nodes] > 0:
        left = sorted(left[:-nodes] + [fit - 1 for fit in left[-nodes:]])
        groups += 1
    assert room_for(fits, nodes) == groups


def test_a_node_has_the_name_that_it_was_given_or_its_host_s():
    assert name_of(node(1)) == "node1"
    assert name_of(node(1) | {"NodeName": "10.0.0.1"}) == "host"


def test_a_server_s_end_is_told_with_what_it_printed(tmp_path):
    def ends(code):
        script = "import os, sys; print(os.environ['SET'], sys.stdin.read(), os.getcwd()); sys.exit(int(sys.argv[1]))"
        return NodeServer().run([sys.executable, "-c", script, str(code)], str(tmp_path), {"SET": "set"}, "told")

    assert ends(0) == ""
    assert ends(3) == f"its server ended with exit code 3: set told {tmp_path}"
    assert "/no/such/python" in NodeServer().run(["/no/such/python"], str(tmp_path), {}, "")
    assert "on a file system that every node mounts" in NodeServer().run([sys.executable], "/no/such/folder", {}, "")


def test_a_server_is_told_to_end_when_its_actor_is_killed():
    script = "import os, signal; print(os.getpid(), flush=True); os.close(1); signal.pause()"
    actor = f"""
import sys; sys.path.insert(0, {str(DRIVER.parent)!r})
from ray_nodes import NodeServer
import ray_nodes, subprocess
started = subprocess.Popen
def seen(command, **more):  # what the server prints is shown here
    return started(command, **{{**more, **({{"stdout": None}} if command[0] == sys.executable else {{}})}})
ray_nodes.subprocess.Popen = seen
NodeServer().run([sys.executable, "-c", {script!r}], "/", {{}}, "")
"""
    running = subprocess.Popen([sys.executable, "-c", actor], stdout=subprocess.PIPE, text=True)
    server = int(running.stdout.readline())
    waits_for = os.pidfd_open(server)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert select.select([waits_for], [], [], 60)[0], "the server ends"
    os.close(waits_for)
    running.stdout.close()


def test_the_driver_s_options_are_explained():
    said = subprocess.run([sys.executable, DRIVER, "--help"], capture_output=True, text=True, check=True).stdout
    assert "start a server on each node" in " ".join(said.split())
    assert Path(DRIVER).name in said
