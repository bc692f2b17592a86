"""All nodes of a cell on one machine: how their ranks meet there, and which of its devices each of them sees."""

from __future__ import annotations

import os
import socket
import sys

import torch

from harness.core.cell import Cell
from harness.core.errors import LaunchError

AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""What tells ranks that somebody else holds the store in which they meet."""

ELASTIC = {
    "TORCHELASTIC_RUN_ID": "plumbline",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    **AGENT_STORE,
}
"""What torchrun says of itself, where there is none."""

_LOOPBACKS = (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))


def loopback() -> str:
    """Return the address at which processes of this machine reach each other.

    Raises:
        LaunchError: there is none.
    """
    for address, family in _LOOPBACKS:
        try:
            with socket.create_server((address, 0), family=family) as server:
                # One that is down can be listened on all the same.
                socket.create_connection(server.getsockname()[:2], timeout=1).close()
        except OSError:
            continue
        return address
    raise LaunchError("this machine has no loopback address, 127.0.0.1 or ::1: bring it up (ip link set lo up)")


def variables(cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
    """Return what ranks need that share this machine."""
    return {
        **ELASTIC,
        "MASTER_ADDR": loopback(),
        # Names of network interfaces are the machine's affair; ranks on one machine meet on loopback.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **own_devices(cell, rank, oversubscribe),
    }


def own_devices(cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
    """Return what lets each node see its own CUDA devices only, as a machine of its own would.

    That is also for a single node: trainers take all devices that they see (``DataParallel(model)``, for one).
    """
    found = {}
    if cell.accelerator == "cuda" and not oversubscribe:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        every = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
        first = rank // cell.contract.processes_per_node(cell.topology) * cell.topology.gpus
        if not visible:  # else the user's numbers mean what they meant
            found["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        found["CUDA_VISIBLE_DEVICES"] = ",".join(every[first : first + cell.topology.gpus])
    return found
