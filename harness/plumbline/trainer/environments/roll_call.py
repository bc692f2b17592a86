"""Checks, before ranks train together, that each of them is there, and only once."""

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
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 or torchrun holds, once all ranks have joined it.

    Raises:
        MisconfigurationError: not all came in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = LOOPBACK_JOIN_TIMEOUT if num_nodes > 1 and is_loopback(address) else default_pg_timeout
    try:
        store: Store
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    except (DistNetworkError, DistStoreError) as error:
        raise not_all_came(world_size, address, port, timeout) from error
    store.set_timeout(default_pg_timeout)
    return store


def join_timeout(address: str) -> timedelta:
    """Return how long the ranks of several nodes wait for each other at ``address``."""
    return LOOPBACK_JOIN_TIMEOUT if is_loopback(address) else JOIN_TIMEOUT


def is_loopback(address: str) -> bool:
    """Return whether an address, or a name for it, leads every host to itself."""
    return address.startswith("127.") or address in ("localhost", "::1")


def not_all_came(world_size: int, address: str, port: int, timeout: timedelta) -> MisconfigurationError:
    """Return the error for ranks that are missing."""
    if is_loopback(address):
        way = (
            f"{address} leads every host to itself, so ranks on other hosts never meet there: "
            "set MASTER_ADDR to an address by which they reach the first node"
        )
    else:
        way = "does every node run, with the same MASTER_ADDR and MASTER_PORT, and is one of them node 0?"
    return MisconfigurationError(f"Not all of the {world_size} ranks came to {address}:{port} in {timeout}: {way}")


def call_roll(rank: int, world_size: int, address: str, port: int, timeout: timedelta | None = None) -> None:
    """Return when ``world_size`` processes have registered their ranks at ``address``, and no two the same.

    Without it, nodes that all have the same NODE_RANK would wait for the others' ranks for half an hour.

    Raises:
        MisconfigurationError: two processes are the same rank, or not all came in time.
    """
    timeout = timeout or join_timeout(address)
    try:
        store, holds_it = _store(rank == 0, address, port, timeout)
        store.add(f"rank/{rank}", 1)
        if store.add("arrived", 1) == world_size:
            store.set("complete", "")
        store.wait(["complete"], timeout)
        # Every process reads this before any of them leaves: where no rank is missing, none is there twice.
        missing = [other for other in range(world_size) if not store.add(f"rank/{other}", 0)]
        if store.add("left", 1) == world_size:
            store.set("empty", "")
    except (DistNetworkError, DistStoreError) as error:
        raise not_all_came(world_size, address, port, timeout) from error
    # No process goes on before the port is free again, or it would join this store instead of the next one.
    with suppress(DistNetworkError, DistStoreError):
        store.wait(["empty" if holds_it else "the end"], timeout)
    del store
    if missing:
        raise MisconfigurationError(
            f"{world_size} ranks came to {address}:{port}, but none of them is rank {missing[0]}, and others are there "
            "twice: give each node a NODE_RANK of its own."
        )


def _store(first: bool, address: str, port: int, timeout: timedelta) -> tuple[TCPStore, bool]:
    """Return the store that rank 0 holds and the others join, and whether it is held here.

    A second rank 0 finds the port taken, if it is on the same host, and joins.
    """
    if first:
        with suppress(DistNetworkError):
            return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout), True
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout), False
