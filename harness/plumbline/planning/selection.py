"""Which combinations of the matrix become cells: those that can show something that a smaller one cannot."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.core.backend import Backend, resized
from plumbline.core.topology import Topology
from plumbline.workloads import PerformanceWorkload, Workload


def is_worth_a_cell(
    workload: Workload,
    backend: Backend,
    topology: Topology,
    precision: str,
    planned: Sequence[Topology],
    stages_per_rank: int = 1,
) -> bool:
    """Say whether a combination can show something that a smaller one of the ``planned`` topologies cannot.

    If the trainer chooses its backend itself, one topology is enough. An elastic workload also needs another topology,
    where its training begins.
    """
    if isinstance(workload, PerformanceWorkload):
        return _is_worth_timing(workload, backend, topology, precision, planned)
    if not _suits_experts(workload, backend):
        return False
    small = [t for t in planned if t.num_nodes == 1 and t.gpus <= 3]
    if backend.chosen_by_trainer:
        return topology == small[1] and not workload.narrow
    if workload.elastic and not backend.fits(resized(topology, backend)):
        return False
    return not workload.narrow or (
        precision in workload.precisions and topology in _narrow(backend, small, stages_per_rank)
    )


def _suits_experts(workload: Workload, backend: Backend) -> bool:
    return backend.opt_in if workload.experts else not backend.divides_experts


def is_sampled(workload: Workload, backend: Backend, topology: Topology, precision: str) -> bool:
    """Say whether a cell is one of the few that are planned for a sampled backend.

    They are in float32, on the smallest topology and on the smallest one where each dimension has several devices. Of
    the narrow workloads, those that couple stages are included.
    """
    if isinstance(workload, PerformanceWorkload) or (workload.narrow and not workload.couples_stages):
        return False
    return precision == "32" and topology in (backend.smallest, backend.smallest_whole)


def _narrow(backend: Backend, small: Sequence[Topology], stages_per_rank: int) -> set[Topology]:
    """Return the topologies of narrow workloads: one device, and up to three on one node.

    The backend's smallest topology is added if it fits neither, or if few workloads suit the backend: many stages, for
    example, need more blocks than most models have. A sampled backend has only its smallest topology.
    """
    if backend.sampled:
        return {backend.smallest}
    found = {small[0], small[-1]}
    few = backend.divides_experts or backend.divides_sequences or stages_per_rank > 1
    return found | {backend.smallest} if few or backend.smallest not in small else found


def _is_worth_timing(
    workload: PerformanceWorkload, backend: Backend, topology: Topology, precision: str, planned: Sequence[Topology]
) -> bool:
    """Say whether a cell is measured: on powers of two devices of one node, and on the largest topology of several.

    A workload's first precision is measured on all of them, the others only on the smallest topology of each backend.
    A backend that the trainer chooses itself is another name for one that is already measured.
    """
    if backend.chosen_by_trainer or precision not in workload.precisions:
        return False
    if workload.backends is not None and backend.name not in workload.backends:
        return False
    places = [place for place in _timed(workload, backend, planned) if backend.fits(place)]
    return topology in (places if precision == workload.precisions[0] else places[:1])


def _timed(workload: PerformanceWorkload, backend: Backend, planned: Sequence[Topology]) -> list[Topology]:
    single = [t for t in planned if t.num_nodes == 1]
    largest = max(t.gpus for t in single)
    places = [t for t in single if t.gpus == largest or t.gpus & (t.gpus - 1) == 0]
    if backend.name in workload.on_nodes:
        several = [t for t in planned if t.num_nodes > 1 and t.gpus > 1]
        places += sorted(several, key=lambda t: (t.devices, t.gpus))[-1:]
    return places
