"""What every cluster environment answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from plumbline.trainer.errors import MisconfigurationError


class ClusterEnvironment(ABC):
    """Reads a copy of the environment variables; changes nothing.

    ``starts_ranks``: the trainer starts this node's ranks itself, no launcher has.
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
    def node_rank(self) -> int:
        """Return the index of this node."""

    @abstractmethod
    def local_rank(self) -> int:
        """Return the index of this process on its node."""

    @abstractmethod
    def main_address(self) -> str:
        """Return the host of rank 0."""

    @abstractmethod
    def main_port(self) -> int:
        """Return the port on which rank 0 listens."""

    def rank(self, local_rank: int, processes_per_node: int) -> int:
        """Return the global rank."""
        return self.node_rank() * processes_per_node + local_rank

    def expected(self, num_nodes: int, processes_per_node: int) -> dict[str, int]:
        """Return what variables must say, where they are set, for the topology that the trainer was given."""
        return {}

    def check(self, num_nodes: int, processes_per_node: int) -> None:
        """Raise MisconfigurationError where the environment contradicts the trainer's topology."""
        for variable, wanted in self.expected(num_nodes, processes_per_node).items():
            if self.number(variable, wanted) != wanted:
                raise MisconfigurationError(
                    f"{self.name} says {variable}={self.variables[variable]}, but the trainer's gpus, "
                    f"num_nodes and distributed_backend mean {wanted}: change them, or what {self.name} "
                    "starts."
                )

    def number(self, variable: str, default: int | None = None) -> int:
        """Return a variable as a whole number; without a default it must be set."""
        text = self.variables.get(variable, "")
        if not text and default is not None:
            return default
        if not text.strip().isdecimal():
            raise MisconfigurationError(
                f"{variable} is {text!r}, but {self.name} needs a whole number there: set {variable}."
            )
        return int(text)
