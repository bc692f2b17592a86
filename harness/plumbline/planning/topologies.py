"""Which topologies a budget of devices is tried on."""

from __future__ import annotations

from plumbline.core.errors import PlanError
from plumbline.core.topology import Topology

COUNTS = (1, 2, 3, 4, 8)
"""Device counts that are tried within a budget: 3 because mistakes hide behind powers of two."""

DEFAULT_GPUS = 4


def topologies(gpus: int, nodes: int | None = None) -> list[Topology]:
    """Return the topologies of a budget: device counts up to ``gpus`` and their splits into nodes.

    With ``nodes``, ``gpus`` is per node, and the largest topology is ``nodes`` × ``gpus``.

    Raises:
        PlanError: a number is not positive.
    """
    if gpus < 1:
        raise PlanError(f"--gpus {gpus}: at least one device is needed")
    if nodes is not None and nodes < 1:
        raise PlanError(f"--nodes {nodes}: at least one node is needed")
    found = {Topology(1, count) for count in _counts(gpus)}
    found |= _splits(gpus) if nodes is None else _up_to(nodes, gpus)
    return sorted(found, key=lambda topology: (topology.devices, topology.num_nodes))


def _splits(gpus: int) -> set[Topology]:
    """Return the ways in which the devices of a budget are split into nodes of several; two nodes of one are one way.

    More nodes of one gpu each say nothing that two do not.
    """
    found = {Topology(2, 1)} if gpus >= 2 else set()
    for count in _counts(gpus):
        found |= {Topology(n, count // n) for n in range(2, count) if count % n == 0 and count // n > 1}
    return found


def _up_to(nodes: int, gpus: int) -> set[Topology]:
    return {Topology(n, g) for n in {1, min(2, nodes), nodes} for g in {min(2, gpus), gpus}}


def _counts(limit: int) -> list[int]:
    return sorted({count for count in COUNTS if count <= limit} | {limit})
