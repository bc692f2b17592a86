"""The default address at which this machine listens for its nodes: a single one, never all addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from plumbline.core.errors import PlanError
from plumbline.worker.node_server import addresses

_ANY_PORT = 9


def only_address() -> str:
    """Return this machine's IPv4 address besides loopback; raise ``PlanError`` if it has none or several."""
    found = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise PlanError("this machine has no address at which other hosts could reach it: check its network")
    named = ", ".join(f"{address} on {name}" for name, address in found.items())
    raise PlanError(
        f"this machine has several addresses ({named}): choose the one at which hosts reach it with --listen ADDRESS"
    )


def address_towards(hosts: Iterable[str]) -> str:
    """Return the address from which this machine reaches all ``hosts``, which are names or addresses.

    Raises:
        PlanError: It reaches them from several addresses, or one of them is unknown.
    """
    found: dict[str, str] = {}
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, _ANY_PORT))  # sends nothing; only looks up the route
                found[probe.getsockname()[0]] = host
        except OSError as error:
            raise PlanError(f"this machine cannot reach the node {host} ({error}): check the network") from error
    # One of the hosts may be this machine, which reaches itself from a loopback address.
    outside = {address: host for address, host in found.items() if not address.startswith("127.")} or found
    if len(outside) != 1:
        ways = ", ".join(f"{host} from {address}" for address, host in outside.items()) or "there are no nodes"
        raise PlanError(
            f"this machine reaches its nodes from several addresses ({ways}): choose one with --listen ADDRESS"
        )
    return next(iter(outside))
