"""Before ranks train together: is each of them there, and only once?"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from harness.trainer.errors import MisconfigurationError

PATIENCE = timedelta(minutes=10)
"""How long nodes may start one after another."""


def call_roll(rank: int, world_size: int, address: str, port: int, patience: timedelta = PATIENCE) -> None:
    """Return when ``world_size`` processes have said who they are at ``address``, and no two say the same.

    Without it, nodes that were all told one NODE_RANK would wait for the others' ranks for half an hour.

    Raises:
        MisconfigurationError: two processes are the same rank, or not all came in time.
    """
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
        raise MisconfigurationError(
            f"Not all of the {world_size} ranks came to {address}:{port} in {patience}: does every node run, with the "
            "same MASTER_ADDR and MASTER_PORT, and is one of them NODE_RANK=0?"
        ) from error
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
