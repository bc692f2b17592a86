"""The backends a trainer may offer, and what each of them promises about who computes what.

The promise (the *contract*) is all the judge needs: how many processes a topology means, how the loss is split
between them, and over how many devices a process spreads its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from harness.core.topology import Topology


@dataclass(frozen=True)
class Backend:
    """One ``distributed_backend`` of a trainer.

    ``process_per_device``: a process drives one device (ddp, fsdp, zero) or all devices of its node (dp, ddp2).
    ``several_devices`` / ``several_nodes``: the least a topology must have for the backend to mean something.
    ``rare``: few trainers have it, so one that does not is not asked for it, unless the user does.
    """

    name: str
    process_per_device: bool
    several_devices: bool
    several_nodes: bool
    rare: bool = False

    def fits(self, topology: Topology) -> bool:
        """Say whether the backend does on this topology what no simpler backend does there."""
        if self.several_nodes:
            return topology.num_nodes > 1 and topology.gpus > 1
        if self.process_per_device:
            return topology.devices > 1
        return topology.num_nodes == 1 and (topology.gpus > 1) == self.several_devices

    def processes_per_node(self, topology: Topology) -> int:
        """Return how many ranks live on each node."""
        return topology.gpus if self.process_per_device else 1

    def processes(self, topology: Topology) -> int:
        """Return the world size: ranks over all nodes."""
        return topology.num_nodes * self.processes_per_node(topology)

    def devices_per_process(self, topology: Topology) -> int:
        """Return how many devices one rank drives."""
        return 1 if self.process_per_device else topology.gpus


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("none", process_per_device=False, several_devices=False, several_nodes=False),
        # No backend named, several gpus: the trainer chooses, and promises what dp promises.
        Backend("auto", process_per_device=False, several_devices=True, several_nodes=False, rare=True),
        Backend("dp", process_per_device=False, several_devices=True, several_nodes=False),
        Backend("ddp", process_per_device=True, several_devices=True, several_nodes=False),
        Backend("ddp2", process_per_device=False, several_devices=True, several_nodes=True),
        # What ddp promises; ranks share out weights, gradients and the optimizer's state, or that state alone.
        Backend("fsdp", process_per_device=True, several_devices=True, several_nodes=False, rare=True),
        Backend("zero", process_per_device=True, several_devices=True, several_nodes=False, rare=True),
    )
}


def resized(topology: Topology, backend: Backend) -> Topology:
    """Return another number of devices, as near as there is: one gpu fewer on each node, or one node fewer.

    Where the backend makes no sense on less, it is one gpu more.
    """
    nodes, gpus = topology.num_nodes, topology.gpus
    fewer = [Topology(nodes, gpus - 1)] if gpus > 1 else []
    fewer += [Topology(nodes - 1, gpus)] if nodes > 1 else []
    return next((smaller for smaller in fewer if backend.fits(smaller)), Topology(nodes, gpus + 1))


class Declared(Protocol):
    """What says of a trainer that it has some backends."""

    @property
    def name(self) -> str:
        """What reports call the trainer."""

    @property
    def backends(self) -> Sequence[str]:
        """Those of which this speaks."""


D = TypeVar("D", bound=Declared)


def declared_for(name: str, backend: str, declared: Sequence[D]) -> D:
    """Return what the trainer called ``name`` declared for a backend; where that is nothing, its first declaration."""
    own = [one for one in declared if one.name == name]
    return next((one for one in own if backend in one.backends), own[0])
