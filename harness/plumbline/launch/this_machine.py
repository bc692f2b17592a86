"""The machine that launches: environment variables, rendezvous, devices and addresses, and how many ranks it holds."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.devices.counting import count, only, visible_names
from plumbline.devices.host_memory import free_bytes_of_host
from plumbline.devices.types import device_type

AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Tells ranks that another process serves the rendezvous store."""

ELASTIC = {
    "TORCHELASTIC_RUN_ID": "plumbline",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    **AGENT_STORE,
}
"""Variables that torchrun sets about itself, for launches without torchrun."""

QUICK_RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""torch's TCPStore looks up the name of the address it connects to, which is not needed. When dozens of ranks ask a DNS
server at once, some answers get lost, and each such rank would wait for the default timeout of 5 s."""

_LOOPBACKS = (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))


def loopback() -> str:
    """Return the address at which processes of this machine reach each other."""
    for address, family in _LOOPBACKS:
        try:
            with socket.create_server((address, 0), family=family) as server:
                # Listening succeeds even on an interface that is down, so connect as well.
                socket.create_connection(server.getsockname()[:2], timeout=1).close()
        except OSError:
            continue
        return address
    raise LaunchError(
        "this machine has no loopback address, 127.0.0.1 or ::1: bring the interface up (ip link set lo up)"
    )


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``address`` alone, and so reserves its port.

    It is an IPv4 socket if possible: only a DNS server resolves the names of a dual-stack socket's addresses.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise LaunchError(f"ranks cannot meet at {address}: this process cannot listen there ({error})") from error


def store_on(listener: socket.socket, address: str) -> TCPStore:
    """Return a rendezvous store on a socket. Ranks join it as they would join the store of torchrun's agent."""
    port = listener.getsockname()[1]
    options: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": os.dup(listener.fileno()),  # the store closes it, once started
    }
    try:
        return TCPStore(address, port, **options)
    except NotImplementedError:  # in torch 2.4 and 2.6, the default server does not accept a listening socket
        return TCPStore(address, port, use_libuv=False, **options)


def new_store(address: str) -> TCPStore:
    """Return a rendezvous store that listens at ``address`` alone; see :func:`listen`."""
    with listen(address) as listener:
        return store_on(listener, address)


def torchrun_variables(rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, apart from the address of the rendezvous."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_world_size,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}


def local_variables(address: str) -> dict[str, str]:
    """Return the variables of ranks that meet at ``address``, a loopback address of this machine."""
    # The names of other network interfaces differ between machines.
    return {**ELASTIC, "MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def own_devices(cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
    """Return the variables that let each node see only its own devices, as on a separate machine.

    A single node needs them too, because some trainers use all visible devices (``DataParallel(model)``, for example).
    """
    if cell.accelerator == "cpu" or oversubscribe:
        return {}
    first = rank // cell.parallelism.processes_per_node(cell.topology) * cell.topology.gpus
    return only(cell.accelerator, first, cell.topology.gpus)


def devices_of(cell: Cell, oversubscribe: bool) -> tuple[str, ...]:
    """Return the names of the devices that a launch of ``cell`` uses; none if they are simulated.

    A device has the same name in every process, whichever devices the process sees.
    """
    if cell.accelerator == "cpu":
        return ()
    present = count(cell.accelerator)
    used = present if oversubscribe else cell.topology.num_nodes * cell.topology.gpus
    return tuple(_device_name(cell.accelerator, index) for index in range(min(used, present)))


def _device_name(accelerator: str, index: int) -> str:
    """Return a device's UUID, or its index if this torch does not report the UUID."""
    on_cuda = accelerator == "cuda"
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None) if on_cuda else None
    if uuid is not None:
        return f"GPU {uuid}"
    named = visible_names(accelerator)
    return f"{'GPU' if on_cuda else device_type(accelerator).label} {named[index].strip() if named else index}"


LEAST_BYTES = 6 << 20
"""Memory that a rank has for itself, at least: one that is forked, joins a group over gloo and reduces a single tensor
has 6.0 to 6.3 MiB (Linux, torch 2.13, 2 to 24 ranks). It only refuses what cannot work: ranks that train need more."""

_GIB = 1 << 30


def why_too_many(ranks: int) -> str:
    """Return why this machine cannot hold so many ranks, in a sentence; "" if it may."""
    free, most = free_bytes_of_host(), _processes_left()
    if most is not None and ranks > most:
        return f"{ranks} ranks need {ranks} processes, and this machine allows at most {most}: use fewer"
    needed = ranks * LEAST_BYTES
    if free is not None and needed > free:
        return (
            f"{ranks} ranks need about {_gib(needed)} GiB of memory, and this machine has {_gib(free)} GiB free: use "
            "fewer"
        )
    return ""


def _gib(size: int) -> str:
    return f"{size / _GIB:,.0f}" if size >= 10 * _GIB else f"{size / _GIB:.1f}"


def _processes_left() -> int | None:
    """Return how many processes can be started at most; None if this is unknown. Running ones count where possible."""
    limits = [_number("/proc/sys/kernel/pid_max")]
    if (most := _number("/sys/fs/cgroup/pids.max")) is not None:
        limits.append(most - (_number("/sys/fs/cgroup/pids.current") or 0))
    if hasattr(os, "geteuid") and os.geteuid() != 0:  # the limit does not apply to root
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits.append(None if soft == resource.RLIM_INFINITY else soft)
    return min((one for one in limits if one is not None), default=None)


def _number(file: str) -> int | None:
    try:
        return int(Path(file).read_text(encoding="ascii"))
    except (OSError, ValueError):  # another system, or "max": no limit
        return None
