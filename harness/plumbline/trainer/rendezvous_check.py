"""Checks, before ranks train together, that each rank is present exactly once."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from plumbline.trainer.errors import MisconfigurationError

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long nodes wait for each other: they may be started one after another."""

LOOPBACK_JOIN_TIMEOUT = timedelta(minutes=2)
"""How long they wait at a loopback address, where ranks of other hosts never arrive."""


def meet(rank: int, world_size: int, num_nodes: int) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 or torchrun hosts, once all ranks have joined it.

    Raises:
        MisconfigurationError: not all ranks joined in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = LOOPBACK_JOIN_TIMEOUT if num_nodes > 1 and is_loopback(address) else default_pg_timeout
    try:
        store: Store
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    except (DistNetworkError, DistStoreError) as error:
        raise missing_ranks(world_size, address, port, timeout) from error
    store.set_timeout(default_pg_timeout)
    return store


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def missing_ranks(world_size: int, address: str, port: int, timeout: timedelta) -> MisconfigurationError:
    if is_loopback(address):
        way = (
            f"{address} leads every host to itself, so ranks on other hosts never meet there: "
            "set MASTER_ADDR to an address by which they reach the first node."
        )
    else:
        way = "check that every node runs with the same MASTER_ADDR and MASTER_PORT, and that one of them is node 0."
    return MisconfigurationError(f"Not all of the {world_size} ranks came to {address}:{port} in {timeout}: {way}")


def check_rendezvous(rank: int, world_size: int, address: str, port: int, timeout: timedelta | None = None) -> None:
    """Wait until ``world_size`` processes have registered different ranks at ``address``.

    Without this check, nodes that all have the same NODE_RANK would wait for each other for half an hour.

    Raises:
        MisconfigurationError: two processes have the same rank, or not all registered in time.
    """
    timeout = timeout or (LOOPBACK_JOIN_TIMEOUT if is_loopback(address) else JOIN_TIMEOUT)
    try:
        store, holds_it = _store(rank == 0, address, port, timeout)
        store.add(f"rank/{rank}", 1)
        if store.add("arrived", 1) == world_size:
            store.set("complete", "")
        store.wait(["complete"], timeout)
        # Every process reads this before any of them leaves. If no rank is missing, no rank is there twice.
        missing = [other for other in range(world_size) if not store.add(f"rank/{other}", 0)]
        if store.add("left", 1) == world_size:
            store.set("empty", "")
    except (DistNetworkError, DistStoreError) as error:
        raise missing_ranks(world_size, address, port, timeout) from error
    # No process continues before the port is free again, or it would join this store instead of the next one.
    with suppress(DistNetworkError, DistStoreError):
        store.wait(["empty" if holds_it else "the end"], timeout)
    del store
    if missing:
        raise MisconfigurationError(
            f"{world_size} ranks came to {address}:{port}, but none of them is rank {missing[0]}, and another rank is "
            "there twice: give each node a different NODE_RANK."
        )


def _store(first: bool, address: str, port: int, timeout: timedelta) -> tuple[TCPStore, bool]:
    """Return the store, and whether this process hosts it.

    A second rank 0 on the same host finds the port taken, and joins.
    """
    if first:
        with suppress(DistNetworkError):
            return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout), True
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout), False
