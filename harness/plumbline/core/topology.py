"""Topologies: the number of nodes, of devices per node, and the sizes of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Topology:
    """``num_nodes`` nodes with ``gpus`` devices each, written ``2x4``.

    ``mesh`` has the sizes of the backend's mesh, outermost dimension first, if the user chose them: ``2x4@4x2``.
    Otherwise the backend derives them from the topology.
    """

    num_nodes: int
    gpus: int
    mesh: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus < 1:
            raise ValueError(f"a topology needs at least one node and one device: {self}")
        if self.mesh and prod(self.mesh) != self.devices:
            raise ValueError(f"the mesh of {self} has {prod(self.mesh)} devices, not {self.devices}")

    @property
    def devices(self) -> int:
        return self.num_nodes * self.gpus

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus}@{self.mesh_sizes}" if self.mesh else f"{self.num_nodes}x{self.gpus}"

    @property
    def mesh_sizes(self) -> str:
        """The sizes of the mesh that the user chose, for example ``4x2``, or an empty string."""
        return "x".join(map(str, self.mesh))

    @classmethod
    def parse(cls, text: str) -> Topology:
        place, _, mesh = text.partition("@")
        num_nodes, gpus = map(int, place.split("x"))
        return cls(num_nodes, gpus, tuple(map(int, mesh.split("x"))) if mesh else ())
