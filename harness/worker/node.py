"""The fork server of a node that is not the launcher's own: its commands and events travel over one connection."""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence

TOKEN = "PLUMBLINE_TOKEN"
"""The variable with the secret by which a launcher knows its own nodes."""

PATIENCE = 30.0
"""Seconds in which the launcher must answer a connection."""

_SIOCGIFADDR = 0x8915


def main(arguments: Sequence[str] | None = None) -> int:
    """Connect, say who this is, then serve until the connection ends; return the exit code."""
    options = _options(arguments)
    host, _, port = os.path.expandvars(options.connect).rpartition(":")
    node = os.path.expandvars(options.node)
    token = os.environ.pop(TOKEN, "")
    if not (host and port.isdecimal() and node.isdecimal() and token):
        said = f"--connect {host}:{port} --node {node}, {TOKEN} {'set' if token else 'not set'}"
        print(f"harness.worker: a launcher's address, a node's number and a token are needed, not {said}")
        return 4
    try:
        connection = socket.create_connection((host, int(port)), PATIENCE)
    except OSError as error:
        print(f"harness.worker: {socket.gethostname()} cannot reach the launcher at {host}:{port}: {error}")
        return 2
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    hello = {
        "event": "hello",
        "token": token,
        "node": int(node),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "launcher": host,
        "interface": interface_of(connection.getsockname()[0]),
        "at": time.monotonic(),
    }
    connection.sendall(json.dumps(hello).encode() + b"\n")
    from harness.worker.server import Server

    # What anybody prints goes to standard error. Lines are short, and the launcher reads: each is one whole write.
    os.dup2(2, 1)
    commands, events = connection.detach(), -1
    events = os.dup(commands)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Server(options.subject, commands, events).serve()
    return 0


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address, "" where none has it."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found) == address or (name == "lo" and address.startswith("127.")):
                return name
    return ""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.worker", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the launcher listens")
    parser.add_argument("--node", required=True, metavar="N", help="which of the launcher's nodes this is, from 0")
    parser.add_argument("subject", help="the subject's locator")
    return parser.parse_args(arguments)
