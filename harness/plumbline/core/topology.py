"""Topologies: how many nodes a cell has, how many devices each of them, and how the user arranged these in a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Topology:
    """``num_nodes`` nodes with ``gpus`` devices each, written ``2x4``.

    ``mesh`` has the sizes of the backend's mesh, outermost dimension first, where the user chose them (``2x4@4x2``);
    without it the backend derives them from the topology.
    """

    num_nodes: int
    gpus: int
    mesh: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus < 1:
            raise ValueError(f"a topology has at least one node and one device, not {self}")
        if self.mesh and prod(self.mesh) != self.devices:
            raise ValueError(f"a mesh of {prod(self.mesh)} devices does not cover the {self.devices} of {self}")

    @property
    def devices(self) -> int:
        return self.num_nodes * self.gpus

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus}@{self.mesh_sizes}" if self.mesh else f"{self.num_nodes}x{self.gpus}"

    @property
    def mesh_sizes(self) -> str:
        """The sizes of the mesh that the user chose, as ``4x2``; empty where the backend derives them."""
        return "x".join(map(str, self.mesh))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology that is written like this.

        Raises:
            ValueError: there is no such topology.
        """
        place, _, mesh = text.partition("@")
        num_nodes, gpus = map(int, place.split("x"))
        return cls(num_nodes, gpus, tuple(map(int, mesh.split("x"))) if mesh else ())
