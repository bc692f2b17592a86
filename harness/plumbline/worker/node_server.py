"""The fork server of a node: it connects to the launcher, for commands and events."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plumbline.worker.authenticated_channel import greet
from plumbline.worker.launcher_link import NetworkLink

TOKEN = "PLUMBLINE_TOKEN"
"""The variable with the secret that a launcher and its nodes share."""

NODE_NAME = "PLUMBLINE_NODE_NAME"
"""The variable with the cluster's name for this node, if that is not its host name."""

CONNECT_TIMEOUT_S = 30.0
"""Time in which the launcher must accept this node."""

_ATTEMPT_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.2

KEEPALIVE_TIMEOUT_S = 15
"""Seconds after which a connection ends if its other end does not answer the kernel's probes."""

EXIT_DISCONNECTED = 3
"""The exit code of a server that lost the connection to its launcher. torchrun restarts such a server."""

_SIOCGIFADDR = 0x8915

_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Connect to the launcher, and serve until the connection ends; return the exit code."""
    options = _options(arguments)
    places = [os.path.expandvars(place).rpartition(":")[::2] for place in options.connect]
    node = os.path.expandvars(options.as_node)
    token = os.environ.pop(TOKEN, "")
    if options.token_from_stdin:
        token = sys.stdin.readline().strip()
    if not (all(host and port.isdecimal() for host, port in places) and node.isdecimal() and token):
        at = " ".join(f"--connect {host}:{port}" for host, port in places)
        given = f"{at} --as-node {node}, {TOKEN} {'set' if token else 'not set'}"
        print(f"plumbline.worker needs a launcher's address, a node's number and a token, but got {given}")
        return 4
    try:
        channel = _connect(
            [(host, int(port)) for host, port in places],
            lambda connection, host: greet(connection, token, _description(int(node), host, connection)),
        )
    except OSError as error:
        tried = " or ".join(f"{host}:{port}" for host, port in places)
        print(f"plumbline.worker: {socket.gethostname()} cannot reach the launcher at {tried}: {error}")
        return 2
    from plumbline.worker.server import Server

    os.dup2(2, 1)  # everything that is printed goes to standard error
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    served = Server(options.subject, NetworkLink(channel), describe=_software_and_devices).serve()
    return 0 if served else EXIT_DISCONNECTED


def enable_keepalive(connection: socket.socket) -> None:
    """Make a connection fail when its other end disappears without closing it.

    The kernel probes an idle connection, and limits the time of data in flight.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_TIMEOUT_S // 3),
        ("TCP_KEEPINTVL", KEEPALIVE_TIMEOUT_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * KEEPALIVE_TIMEOUT_S),
    ):
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def addresses() -> dict[str, str]:
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:  # an interface without an address
                continue
    return found


def _connect(places: Sequence[tuple[str, int]], begin: Callable[[socket.socket, str], _T]) -> _T:
    """Call ``begin`` with a connection and its host, at the first place where that succeeds; return its result.

    All places are tried until ``CONNECT_TIMEOUT_S`` has passed, because the launcher may start later than this process,
    and a new network or a busy machine may lose the first packets.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        for place in places:
            try:
                connection = socket.create_connection(place, _ATTEMPT_TIMEOUT_S)
            except OSError as error:
                last = error
                continue
            try:
                enable_keepalive(connection)
                return begin(connection, place[0])
            except OSError as error:
                connection.close()
                last = error
        if time.monotonic() > deadline:
            raise last
        time.sleep(_RETRY_INTERVAL_S)


def _description(node: int, host: str, connection: socket.socket) -> bytes:
    description = {
        "node": node,
        "host": os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "launcher": host,
        **_way_to_others(connection),
        **_counts_from_starter(),
        "at": time.monotonic(),
    }
    return json.dumps(description).encode()


def _way_to_others(connection: socket.socket) -> dict[str, Any]:
    """Return the interface and the address at which the ranks of other nodes reach the ranks of this node.

    By default it is the interface that leads to the launcher; GLOO_SOCKET_IFNAME chooses another one.
    """
    own, here = connection.getsockname()[0], addresses()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not chosen:
        name = next((name for name, address in here.items() if address == own), "")
        return {"interface": "lo" if own.startswith("127.") and "lo" in here else name, "address": own, "chosen": False}
    return {"interface": chosen, "address": here.get(chosen.split(",")[0], ""), "chosen": True}


def _counts_from_starter() -> dict[str, int | None]:
    nodes, servers = (
        next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)
        for names in (("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES"), ("LOCAL_WORLD_SIZE",))
    )
    return {"nodes": nodes, "servers": servers}


def _software_and_devices() -> dict[str, Any]:
    import torch

    from plumbline.devices.counting import counts

    python = ".".join(map(str, sys.version_info[:2]))
    versions = {"torch": torch.__version__, "python": python, "plumbline": package_hash()}
    return {**versions, "devices": counts()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plumbline.worker", description=__doc__)
    at = "the address of the launcher; if there are several, the first that answers"
    parser.add_argument("--connect", required=True, action="append", metavar="HOST:PORT", help=at)
    parser.add_argument("--as-node", required=True, metavar="N", help="the number of this node, from 0")
    parser.add_argument(
        "--token-from-stdin", action="store_true", help=f"read the token from standard input instead of {TOKEN}"
    )
    parser.add_argument("subject", help="the subject's locator")
    return parser.parse_args(arguments)


def package_hash() -> str:
    """Return the SHA-256 of all Python files of this package and their paths in it."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n{file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
