"""Topologies: how many nodes a cell has, and how many devices each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Topology:
    """``num_nodes`` nodes with ``gpus`` devices each, written ``2x4``."""

    num_nodes: int
    gpus: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus < 1:
            raise ValueError(f"a topology has at least one node and one device, not {self}")

    @property
    def devices(self) -> int:
        """Devices over all nodes."""
        return self.num_nodes * self.gpus

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus}"
