"""Simulated hosts on this machine: network namespaces with addresses and names, connected by a bridge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbline.launch.launchers.hosts import HostsLauncher
from plumbline.launch.pool import LauncherOptions
from plumbline.worker.node_server import addresses

INSTALL = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "iproute2"]


def ip(*words, check=True):
    """Run iproute2; return its output."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {words}: {done.stderr}"
    return done.stdout


def cannot_be_had():
    """Return in one line why such hosts are impossible here, or None. As root, install iproute2."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "hosts of their own are network namespaces: they need root, and Linux"
    if shutil.which("ip") is None:
        if shutil.which("apt-get") is None:
            return "hosts of their own need iproute2, and this is no Debian to install it on"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        if subprocess.run(INSTALL, **quiet).returncode:
            subprocess.run(["apt-get", "update", "-qq"], **quiet)
            if subprocess.run(INSTALL, **quiet).returncode:
                return "hosts of their own need iproute2, and apt-get install iproute2 failed"
    probe = subprocess.run(["ip", "link", "add", f"pl{os.getpid()}", "type", "bridge"], capture_output=True, text=True)
    if probe.returncode:
        return f"hosts of their own cannot be made here: {probe.stderr.strip()}"
    ip("link", "del", f"pl{os.getpid()}")
    return None


def until(holds, seconds=600.0):
    """Wait until ``holds()``; return whether it became true."""
    end = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return true


def remove_those_of_the_killed():
    """Remove the hosts of killed pytest processes."""
    for tag, pid, node in re.findall(r"^(pl(\d+))-(\d+)", ip("netns", "list"), re.MULTILINE):
        if not Path("/proc", pid).exists():
            for process in ip("netns", "pids", f"{tag}-{node}", check=False).split():
                os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", f"{tag}-{node}", check=False)
            ip("link", "del", f"{tag}v{node}", check=False)
            ip("link", "del", tag, check=False)


class Hosts:
    """A number of hosts. ``command`` leads to each of them; this machine is at the bridge between them, as one more."""

    until = staticmethod(until)

    def __init__(self, count):
        self.tag = f"pl{os.getpid()}"
        taken = {tuple(address.split(".")[:3]) for address in addresses().values()}
        self._net = next(f"10.213.{n}" for n in range(1, 255) if ("10", "213", str(n)) not in taken)
        self.count = count
        namespace = f"{self.tag}-{{node}}"
        self.command = f'ip netns exec {namespace} unshare --uts sh -c \'hostname host-{{node}} && exec "$0" "$@"\''
        self.launcher = f"{self._net}.254"

    def __enter__(self):
        remove_those_of_the_killed()
        ip("link", "add", self.tag, "type", "bridge")
        ip("addr", "add", f"{self.launcher}/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")
        for node in range(self.count):
            ip("netns", "add", self.namespace(node))
            ip("link", "add", self.cable(node), "type", "veth", "peer", "name", "eth0", "netns", self.namespace(node))
            ip("link", "set", self.cable(node), "master", self.tag, "up")
            self.inside(node, "link", "set", "lo", "up")
            self.inside(node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            self.inside(node, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_):
        for node in range(self.count):
            for pid in self.processes(node):
                os.kill(pid, signal.SIGKILL)
            ip("netns", "del", self.namespace(node), check=False)
            ip("link", "del", self.cable(node), check=False)
        ip("link", "del", self.tag, check=False)

    def namespace(self, node):
        return f"{self.tag}-{node}"

    def cable(self, node):
        """The bridge's end of a host's cable."""
        return f"{self.tag}v{node}"

    def address(self, node):
        return f"{self._net}.{node + 1}"

    def inside(self, node, *words):
        return ip("-n", self.namespace(node), *words)

    def processes(self, node):
        return [int(pid) for pid in ip("netns", "pids", self.namespace(node), check=False).split()]

    def pull(self, node):
        ip("link", "set", self.cable(node), "down")

    def plug_in(self, node):
        """Reconnect the cable; both ends forget that they could not reach each other."""
        ip("link", "set", self.cable(node), "up")
        assert until(lambda: "LOWER_UP" in self.inside(node, "link", "show", "eth0"))
        self.inside(node, "neigh", "flush", "dev", "eth0")
        ip("neigh", "flush", "dev", self.tag)

    def start(self, node, *words, **variables):
        """Start a command on a host."""
        return subprocess.Popen(
            ["sh", "-c", f'exec {self.command.replace("{node}", str(node))} "$@"', "sh", *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | variables,
        )  # fmt: skip


@pytest.fixture(scope="session")
def hosts():
    """Return two hosts, which are removed at the end of the session."""
    if reason := cannot_be_had():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made
    assert made.tag not in ip("netns", "list") + ip("link", "show")
    assert not list(Path("/etc/netns").glob(f"{made.tag}*"))


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """Check after each test that no process is left on any host."""
    yield
    if "hosts" in request.fixturenames:
        hosts = request.getfixturevalue("hosts")
        assert until(lambda: not any(hosts.processes(node) for node in range(hosts.count)))


@pytest.fixture
def hosts_pool(hosts):
    """Return a pool over both hosts for a locator; closed at the end."""
    pools = []

    def pool(locator):
        options = LauncherOptions(nodes=hosts.count, node_command=hosts.command, listen=hosts.launcher)
        pools.append(HostsLauncher(options).pool(str(locator), None))
        return pools[-1]

    yield pool
    for opened in pools:
        opened.close()
