"""Cluster environments: who this process is, and who starts the others."""

from __future__ import annotations

import random
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

from plumbline.trainer.errors import MisconfigurationError


class ClusterEnvironment(ABC):
    """Reads a copy of the environment variables.

    ``starts_ranks``: the trainer starts this node's ranks itself, because no launcher has started them.
    """

    name: str
    starts_ranks = False

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)

    @staticmethod
    @abstractmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether this environment started the process."""

    @abstractmethod
    def node_rank(self) -> int: ...

    @abstractmethod
    def local_rank(self) -> int: ...

    @abstractmethod
    def main_address(self) -> str:
        """Return the host of rank 0."""

    @abstractmethod
    def main_port(self) -> int: ...

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        return self.node_rank() * processes_per_node + local_rank

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        """Return the values that variables must have, where they are set, to match the trainer's topology."""
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

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in variables or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(variables)

    def node_rank(self) -> int:
        return self.number("GROUP_RANK", 0)

    def local_rank(self) -> int:
        return self.number("LOCAL_RANK")

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        return self.number("RANK")

    def main_address(self) -> str:
        return self.variables.get("MASTER_ADDR", "127.0.0.1")

    def main_port(self) -> int:
        return self.number("MASTER_PORT")

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
    """A task is a rank; the first host of the job is the main one."""

    name = "SLURM"

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Return whether srun has started this process, not counting a shell that srun opened (job name ``bash``)."""
        return {"SLURM_PROCID", "SLURM_NTASKS"} <= set(variables) and variables.get("SLURM_JOB_NAME") != "bash"

    def node_rank(self) -> int:
        return self.number("SLURM_NODEID", 0)

    def local_rank(self) -> int:
        return self.number("SLURM_LOCALID")

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        """Return SLURM_PROCID: with ``--distribution=cyclic`` it does not follow from the node's rank."""
        return self.number("SLURM_PROCID")

    def main_address(self) -> str:
        """Return MASTER_ADDR, where node names do not resolve, or the first host of the job's node list."""
        if self.variables.get("MASTER_ADDR"):
            return self.variables["MASTER_ADDR"]
        nodes = self.variables.get("SLURM_NODELIST") or self.variables.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else "127.0.0.1"

    def main_port(self) -> int:
        """Return MASTER_PORT, or a port that follows from the job's id and lies below the ephemeral ones."""
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
    """Return the different numbers of tasks in SLURM's ``8,4`` or ``2(x3),1``.

    Raises:
        MisconfigurationError: it is malformed.
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise MisconfigurationError(f"The tasks per node {text!r} are malformed: they should look like 8(x2),4.")
    return {int(item.partition("(")[0]) for item in text.split(",")}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: of ``a[01-12,20]b,c3`` it is a01b.

    Raises:
        MisconfigurationError: The brackets or ranges are malformed.
    """
    group = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(rf"{group}(,{group})*", nodes):
        raise MisconfigurationError(f"The node list {nodes!r} is malformed: it should look like node[1-3,7],other4.")
    first = re.match(group, nodes)
    assert first is not None  # it is a part of what matched
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


class PlainEnvironment(ClusterEnvironment):
    """One node needs nothing; several need NODE_RANK, MASTER_ADDR and MASTER_PORT on each."""

    name = "the environment"
    starts_ranks = True

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        return True  # the fallback when no launcher is found

    def node_rank(self) -> int:
        return self.number("NODE_RANK", 0)

    def local_rank(self) -> int:
        return 0  # the process that calls ``fit`` is its node's first

    def main_address(self) -> str:
        return self.variables.get("MASTER_ADDR", "127.0.0.1")

    def main_port(self) -> int:
        return self.number("MASTER_PORT", free_port())

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        if num_nodes == 1:
            for variable in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
                self.variables.pop(variable, None)  # left over from something else
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
    """Return a TCP port on which a process of this host can listen soon.

    It is not reserved, so it is a random one outside of the range from which the system assigns ports.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


ENVIRONMENTS: tuple[type[ClusterEnvironment], ...] = (TorchrunEnvironment, SlurmEnvironment, PlainEnvironment)


def detect_environment(variables: Mapping[str, str]) -> ClusterEnvironment:
    """Return the first environment whose variables are set: torchrun (also inside SLURM), SLURM, plain."""
    return next(kind for kind in ENVIRONMENTS if kind.detect(variables))(variables)
