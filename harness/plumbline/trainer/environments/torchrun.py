"""Ranks that torchrun, or anything that sets its variables, has started."""

from __future__ import annotations

from collections.abc import Mapping

from plumbline.trainer.environments.base import ClusterEnvironment
from plumbline.trainer.errors import MisconfigurationError


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
