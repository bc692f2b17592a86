"""No launcher: the trainer starts this node's ranks itself; variables tell several nodes apart."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from contextlib import suppress

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.errors import MisconfigurationError


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
