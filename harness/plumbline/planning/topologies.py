"""The topologies for a number of devices."""

from __future__ import annotations

from plumbline.core.errors import PlanError
from plumbline.core.topology import Topology

COUNTS = (1, 2, 3, 4, 8)
"""Numbers of devices to try. 3 shows mistakes that powers of two hide."""

DEFAULT_GPUS = 4


def topologies(gpus: int, nodes: int | None = None) -> list[Topology]:
    """Return the topologies of up to ``gpus`` devices, split into nodes in every way.

    With ``nodes``, ``gpus`` is per node, and the largest topology is ``nodes`` × ``gpus``.

    Raises:
        PlanError: a number is not positive.
    """
    if gpus < 1:
        raise PlanError(f"--gpus {gpus}: must be 1 or more")
    if nodes is not None and nodes < 1:
        raise PlanError(f"--nodes {nodes}: must be 1 or more")
    found = {Topology(1, count) for count in _counts(gpus)}
    found |= _splits(gpus) if nodes is None else _up_to(nodes, gpus)
    return sorted(found, key=lambda topology: (topology.devices, topology.num_nodes))


def _splits(gpus: int) -> set[Topology]:
    # More than two nodes with one device each would show nothing new.
    found = {Topology(2, 1)} if gpus >= 2 else set()
    for count in _counts(gpus):
        found |= {Topology(n, count // n) for n in range(2, count) if count % n == 0 and count // n > 1}
    return found


def _up_to(nodes: int, gpus: int) -> set[Topology]:
    return {Topology(n, g) for n in {1, min(2, nodes), nodes} for g in {min(2, gpus), gpus}}


def _counts(limit: int) -> list[int]:
    return sorted({count for count in COUNTS if count <= limit} | {limit})
