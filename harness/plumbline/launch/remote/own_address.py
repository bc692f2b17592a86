"""The address at which this machine listens for its nodes where the user has named none: never all that it has."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from plumbline.core.errors import PlanError
from plumbline.worker.node_server import addresses

_ANY_PORT = 9


def only_address() -> str:
    """Return the IPv4 address that this machine has beside loopback.

    Raises:
        PlanError: it has none, or several.
    """
    found = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise PlanError("this machine has no address by which other hosts could reach it: is its network up?")
    named = ", ".join(f"{address} on {name}" for name, address in found.items())
    raise PlanError(
        f"this machine has several addresses ({named}): name the one at which hosts reach it: --listen ADDRESS"
    )


def address_towards(hosts: Iterable[str]) -> str:
    """Return this machine's address from which it reaches every one of ``hosts``, names or addresses.

    Raises:
        PlanError: it reaches them from several, or one of them is unknown.
    """
    found: dict[str, str] = {}
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, _ANY_PORT))  # sends nothing: it asks the system for the route
                found[probe.getsockname()[0]] = host
        except OSError as error:
            raise PlanError(f"there is no way to the node {host}: {error}; is its network up?") from error
    # One of them may be this machine, by a loopback address.
    outside = {address: host for address, host in found.items() if not address.startswith("127.")} or found
    if len(outside) != 1:
        ways = ", ".join(f"{host} from {address}" for address, host in outside.items()) or "there are no nodes"
        raise PlanError(f"nodes are reached from several addresses ({ways}): name one that all reach: --listen ADDRESS")
    return next(iter(outside))
