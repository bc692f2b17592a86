"""No launcher: the trainer starts this node's ranks itself; several nodes are distinguished by variables."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.errors import MisconfigurationError


class PlainEnvironment(ClusterEnvironment):
    """One node needs nothing; several need NODE_RANK, MASTER_ADDR and MASTER_PORT on each."""

    name = "the environment"
    starts_ranks = True

    @staticmethod
    def detect(variables: Mapping[str, str]) -> bool:
        """Say yes: this is what is left when no launcher is found."""
        return True

    def node_rank(self) -> int:
        """Return NODE_RANK."""
        return self.number("NODE_RANK", 0)

    def local_rank(self) -> int:
        """Return 0: the process that calls ``fit`` is its node's first."""
        return 0

    def main_address(self) -> str:
        """Return MASTER_ADDR, or this host for a single node."""
        return self.variables.get("MASTER_ADDR", "127.0.0.1")

    def main_port(self) -> int:
        """Return MASTER_PORT, or a port that is free on this host."""
        return self.number("MASTER_PORT", free_port())

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        """Raise MisconfigurationError where several nodes are asked for but not distinguished."""
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
    """Return a TCP port that no process on this host listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
