"""Launches on this machine: where ranks meet, which of its devices each node sees, and the devices' names."""

from __future__ import annotations

import os
import socket
import sys

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError

AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Tells ranks that another process holds the rendezvous store."""

ELASTIC = {
    "TORCHELASTIC_RUN_ID": "plumbline",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    **AGENT_STORE,
}
"""What torchrun says of itself, for launches without torchrun."""

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


def new_store(address: str) -> TCPStore:
    """Return a store for one launch's rendezvous. Ranks join it as they join the one that torchrun's agent holds.

    The socket listens on ``address``, and nowhere else, before any rank is given the port, so that no other process can
    take it. It is an IPv4 socket where there is IPv4: a dual-stack socket's addresses have names that only a DNS server
    can resolve.

    Raises:
        LaunchError: this machine does not have that address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise LaunchError(f"ranks cannot meet at {address}, where this process cannot listen: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def variables(cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
    """Return the environment variables of ranks that share this machine."""
    return {
        **ELASTIC,
        "MASTER_ADDR": loopback(),
        # Names of network interfaces differ between machines; ranks on one machine meet on loopback.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **own_devices(cell, rank, oversubscribe),
    }


def own_devices(cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
    """Return the variables with which each node sees its own CUDA devices only, as on a machine of its own.

    A single node needs them too: trainers take all devices that they see (``DataParallel(model)``, for one).
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


def devices_of(cell: Cell, oversubscribe: bool) -> tuple[str, ...]:
    """Return the CUDA devices that a launch of ``cell`` on this machine uses; none where they are simulated.

    Their names are the same in every process, whichever devices it sees in whatever order.
    """
    if cell.accelerator != "cuda":
        return ()
    present = torch.cuda.device_count()
    used = present if oversubscribe else cell.topology.num_nodes * cell.topology.gpus
    return tuple(map(_device_name, range(min(used, present))))


def _device_name(index: int) -> str:
    """Return a device's UUID, or, with a torch that does not know it, its place among the visible ones."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU {uuid}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"GPU {visible.split(',')[index].strip() if visible else index}"
