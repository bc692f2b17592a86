"""Cluster environments: this process's rank, whether a launcher starts the ranks, and where all ranks meet."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from plumbline.trainer.errors import MisconfigurationError


class ClusterEnvironment:
    """Reads ranks and addresses from a copy of the environment variables.

    ``starts_ranks``: the trainer starts this node's ranks itself, because no launcher has started them. The other
    attributes name variables. Without ``local_rank_variable``, this process has local rank 0. Without
    ``rank_variable``, the rank is computed from the node's rank.
    """

    name: str
    starts_ranks = False
    node_rank_variable: str
    local_rank_variable: str | None = None
    rank_variable: str | None = None

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether this environment started the process."""
        raise NotImplementedError

    def node_rank(self) -> int:
        return self.number(self.node_rank_variable, 0)

    def local_rank(self) -> int:
        return self.number(self.local_rank_variable) if self.local_rank_variable else 0

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        if self.rank_variable:
            return self.number(self.rank_variable)
        return self.node_rank() * processes_per_node + local_rank

    def main_address(self) -> str:
        """Return the host of rank 0."""
        return self.variables.get("MASTER_ADDR", "127.0.0.1")

    def main_port(self) -> int:
        return self.number("MASTER_PORT")

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        """Return the values that variables must have, if they are set, to match the trainer's topology."""
        return {}

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        """Raise MisconfigurationError if the environment contradicts the trainer's topology."""
        for variable, wanted in self.expected(num_nodes, processes_per_node).items():
            if self.number(variable, wanted) != wanted:
                raise MisconfigurationError(
                    f"{self.name} says {variable}={self.variables[variable]}, but the trainer's gpus, "
                    f"num_nodes and distributed_backend mean {wanted}: change one of them."
                )

    def number(self, variable: str, default: int | None = None) -> int:
        text = self.variables.get(variable, "")
        if not text and default is not None:
            return default
        if not text.strip().isdecimal():
            raise MisconfigurationError(
                f"{variable} is {text!r}, but {self.name} needs a whole number there: set {variable}."
            )
        return int(text)


class TorchrunEnvironment(ClusterEnvironment):
    """Reads everything from the launcher's variables."""

    name = "torchrun"
    node_rank_variable, local_rank_variable, rank_variable = "GROUP_RANK", "LOCAL_RANK", "RANK"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in variables or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(variables)

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        super().check(num_nodes, processes_per_node)
        pairs = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"))
        for place, size in pairs:
            if self.variables.get(place) and self.variables.get(size) and self.number(place) >= self.number(size):
                raise MisconfigurationError(
                    f"{self.name} says {place}={self.variables[place]} and {size}={self.variables[size]}, but it "
                    "counts from 0: check for variables that were set by hand, or left over."
                )

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        return {
            "WORLD_SIZE": num_nodes * processes_per_node,
            "LOCAL_WORLD_SIZE": processes_per_node,
            "GROUP_WORLD_SIZE": num_nodes,
        }


class SlurmEnvironment(ClusterEnvironment):
    """Each SLURM task is a rank, and rank 0 is on the job's first host.

    Ranks are read from SLURM_PROCID: with ``--distribution=cyclic``, they cannot be computed from the node's rank.
    """

    name = "SLURM"
    node_rank_variable, local_rank_variable, rank_variable = "SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether srun has started this process. An interactive shell (job name ``bash``) does not count."""
        return {"SLURM_PROCID", "SLURM_NTASKS"} <= set(variables) and variables.get("SLURM_JOB_NAME") != "bash"

    def main_address(self) -> str:
        """Return MASTER_ADDR if it is set, as where node names do not resolve, or else the first host of the job."""
        if self.variables.get("MASTER_ADDR"):
            return self.variables["MASTER_ADDR"]
        nodes = self.variables.get("SLURM_NODELIST") or self.variables.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else "127.0.0.1"

    def main_port(self) -> int:
        """Return MASTER_PORT, or a port below the ephemeral ports that depends only on the job's id."""
        return self.number("MASTER_PORT", 12000 + self.number("SLURM_JOB_ID", 0) % 20000)

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        super().check(num_nodes, processes_per_node)
        text = self.variables.get("SLURM_STEP_TASKS_PER_NODE") or self.variables.get("SLURM_TASKS_PER_NODE")
        if text and tasks_per_node(text) != {processes_per_node}:
            raise MisconfigurationError(
                f"SLURM put {text} tasks on its nodes, but the trainer's gpus, num_nodes and distributed_backend mean "
                f"{processes_per_node} on each: start them with srun --ntasks-per-node={processes_per_node}."
            )

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        return {"SLURM_NTASKS": num_nodes * processes_per_node, "SLURM_NNODES": num_nodes}


def tasks_per_node(text: str) -> set[int]:
    """Return the set of task counts in a SLURM string such as ``8,4`` or ``2(x3),1``."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise MisconfigurationError(f"The tasks per node {text!r} are malformed: they should look like 8(x2),4.")
    return {int(item.partition("(")[0]) for item in text.split(",")}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list, such as ``a01b`` of ``a[01-12,20]b,c3``."""
    group = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(rf"{group}(,{group})*", nodes):
        raise MisconfigurationError(f"The node list {nodes!r} is malformed: it should look like node[1-3,7],other4.")
    first = re.match(group, nodes)
    assert first is not None  # the full match begins with a group
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


class PlainEnvironment(ClusterEnvironment):
    """No launcher. One node needs no variables; several need NODE_RANK, MASTER_ADDR and MASTER_PORT on each."""

    name = "the environment"
    starts_ranks = True
    node_rank_variable = "NODE_RANK"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        return True  # the fallback when no launcher is found

    def main_port(self) -> int:
        return self.number("MASTER_PORT", free_port())

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        if num_nodes == 1:
            for variable in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
                self.variables.pop(variable, None)  # set for something else
            return
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not self.variables.get(name)]
        if missing:
            raise MisconfigurationError(
                f"num_nodes={num_nodes} needs {', '.join(missing)}: set NODE_RANK (0 to {num_nodes - 1}), "
                "MASTER_ADDR and MASTER_PORT on each node, or start with torchrun or srun."
            )
        if self.node_rank() >= num_nodes:
            raise MisconfigurationError(
                f"NODE_RANK={self.node_rank()} does not exist among num_nodes={num_nodes}: count nodes from 0."
            )


def free_port() -> int:
    """Return a free TCP port on this host.

    The port is not reserved. To keep it likely free, it is chosen at random outside the range of ephemeral ports.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (TorchrunEnvironment, SlurmEnvironment, PlainEnvironment)


def detect_environment(variables: Mapping[str, str]) -> ClusterEnvironment:
    """Return the first environment that is detected: torchrun (also within SLURM), SLURM, plain."""
    return next(kind for kind in ENVIRONMENTS if kind.detect(variables))(variables)


JOIN_TIMEOUT = timedelta(minutes=10)
"""The time that nodes wait for each other. They can be started one after another."""

LOOPBACK_JOIN_TIMEOUT = timedelta(minutes=2)
"""The time that nodes wait at a loopback address, which ranks on other hosts cannot reach."""


def meet(rank: int, world_size: int, num_nodes: int) -> Store:
    """Wait for all ranks, and return the store at MASTER_ADDR and MASTER_PORT, which rank 0 or torchrun hosts."""
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
            f"{address} is a loopback address, so ranks on other hosts cannot reach it: "
            "set MASTER_ADDR to an address by which they reach the first node."
        )
    else:
        way = "check that every node runs with the same MASTER_ADDR and MASTER_PORT, and that one of them is node 0."
    return MisconfigurationError(f"Not all of the {world_size} ranks came to {address}:{port} in {timeout}: {way}")


def check_rendezvous(rank: int, world_size: int, address: str, port: int, timeout: timedelta | None = None) -> None:
    """Wait until ``world_size`` processes have registered at ``address``, and check that their ranks are different.

    Without this check, nodes with the same NODE_RANK would wait for each other for half an hour.
    """
    timeout = timeout or (LOOPBACK_JOIN_TIMEOUT if is_loopback(address) else JOIN_TIMEOUT)
    try:
        store, holds_it = _store(rank == 0, address, port, timeout)
        store.add(f"rank/{rank}", 1)
        if store.add("arrived", 1) == world_size:
            store.set("complete", "")
        store.wait(["complete"], timeout)
        # Every process reads this before any process leaves. If no rank is missing, no rank is there twice.
        missing = [other for other in range(world_size) if not store.add(f"rank/{other}", 0)]
        if store.add("left", 1) == world_size:
            store.set("empty", "")
    except (DistNetworkError, DistStoreError) as error:
        raise missing_ranks(world_size, address, port, timeout) from error
    # No process continues before the port is free again. Otherwise it could join this store instead of the next one.
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

    A second rank 0 on the same host finds the port in use, and joins the store.
    """
    if first:
        with suppress(DistNetworkError):
            return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout), True
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout), False
