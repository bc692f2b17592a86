"""The base class of cluster environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

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
