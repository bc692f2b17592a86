"""Which squares of the matrix are worth a cell: those that ask something which no smaller one asks."""

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
    """Say whether a cell of the matrix asks something that no smaller one of the ``planned`` topologies does.

    Where the trainer chooses its backend by itself, the question is which: one topology answers. An elastic workload
    needs another number of devices to have come from.
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
    """Say whether a cell is one of the few that are planned of a narrow backend, unless the user names it.

    These are in float32, on the smallest topology and on the smallest where each dimension has several devices. Of
    narrow workloads they are those that couple stages.
    """
    if isinstance(workload, PerformanceWorkload) or (workload.narrow and not workload.couples_stages):
        return False
    return precision == "32" and topology in (backend.smallest, backend.smallest_whole)


def _narrow(backend: Backend, small: Sequence[Topology], stages_per_rank: int) -> set[Topology]:
    """Return the topologies of narrow workloads: one device, and three or as many as there are.

    It is also the smallest topology that a backend fits, where it fits none of these, or few workloads suit it: many
    stages, for example, need more blocks than most models have. For a narrow backend it is that alone.
    """
    if backend.sampled:
        return {backend.smallest}
    found = {small[0], small[-1]}
    few = backend.divides_experts or backend.divides_sequences or stages_per_rank > 1
    return found | {backend.smallest} if few or backend.smallest not in small else found


def _is_worth_timing(
    workload: PerformanceWorkload, backend: Backend, topology: Topology, precision: str, planned: Sequence[Topology]
) -> bool:
    """Say whether a cell is to be measured: powers of two on one node, and the most devices on several.

    Precisions after a workload's first are measured on the smallest topology of each backend: what they cost or gain
    is a matter of the device. A backend that the trainer chooses is another name for one that is measured already.
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
