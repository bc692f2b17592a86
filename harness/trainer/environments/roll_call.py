"""Before ranks train together: is each of them there, and only once?"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from harness.trainer.errors import MisconfigurationError

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long nodes may start one after another."""

LOOPBACK_JOIN_TIMEOUT = timedelta(minutes=2)
"""How long where the main address is every host's own: its ranks start together, and those of others never come."""


def meet(rank: int, world_size: int, num_nodes: int) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 holds, or torchrun; all ranks are there then.

    Raises:
        MisconfigurationError: not all came in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = LOOPBACK_JOIN_TIMEOUT if num_nodes > 1 and is_loopback(address) else default_pg_timeout
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    except (DistNetworkError, DistStoreError) as error:
        raise not_all_came(world_size, address, port, patience) from error
    store.set_timeout(default_pg_timeout)
    return store


def patience_at(address: str) -> timedelta:
    """Return how long the ranks of several nodes wait for each other at ``address``."""
    return LOOPBACK_JOIN_TIMEOUT if is_loopback(address) else JOIN_TIMEOUT


def is_loopback(address: str) -> bool:
    """Say whether an address, or a name for it, leads every host to itself."""
    return address.startswith("127.") or address in ("localhost", "::1")


def not_all_came(world_size: int, address: str, port: int, patience: timedelta) -> MisconfigurationError:
    """Return what is to be said where somebody is missing."""
    if is_loopback(address):
        way = (
            f"{address} leads every host to itself, so ranks on other hosts never meet there: "
            "set MASTER_ADDR to an address by which they reach the first node"
        )
    else:
        way = "does every node run, with the same MASTER_ADDR and MASTER_PORT, and is one of them node 0?"
    return MisconfigurationError(f"Not all of the {world_size} ranks came to {address}:{port} in {patience}: {way}")


def call_roll(rank: int, world_size: int, address: str, port: int, patience: timedelta | None = None) -> None:
    """Return when ``world_size`` processes have said who they are at ``address``, and no two say the same.

    Without it, nodes that were all told one NODE_RANK would wait for the others' ranks for half an hour.

    Raises:
        MisconfigurationError: two processes are the same rank, or not all came in time.
    """
    patience = patience or patience_at(address)
    try:
        store, holds_it = _store(rank == 0, address, port, patience)
        store.add(f"rank/{rank}", 1)
        if store.add("arrived", 1) == world_size:
            store.set("complete", "")
        store.wait(["complete"], patience)
        # Read by everybody before anybody leaves: where nobody is missing, nobody is there twice.
        missing = [other for other in range(world_size) if not store.add(f"rank/{other}", 0)]
        if store.add("left", 1) == world_size:
            store.set("empty", "")
    except (DistNetworkError, DistStoreError) as error:
        raise not_all_came(world_size, address, port, patience) from error
    # Nobody goes on before the port is free again, or it would join this store in the place of the next.
    with suppress(DistNetworkError, DistStoreError):
        store.wait(["empty" if holds_it else "the end"], patience)
    del store
    if missing:
        raise MisconfigurationError(
            f"{world_size} ranks came to {address}:{port}, but none of them is rank {missing[0]}, and others are there "
            "twice: give each node a NODE_RANK of its own."
        )


def _store(first: bool, address: str, port: int, patience: timedelta) -> tuple[TCPStore, bool]:
    """Return the store that rank 0 holds and the others join, and whether it is held here.

    A second rank 0 finds the port taken, if it is on the same host, and joins.
    """
    if first:
        with suppress(DistNetworkError):
            return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=patience), True
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience), False
