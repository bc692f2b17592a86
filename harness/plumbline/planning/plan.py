"""Plans the cells of a run: the combinations that can show a fault that a smaller cell cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from plumbline.core.backend import BACKENDS, Backend, declared_for, resized
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.finding import Finding
from plumbline.core.named_registry import unknown_name
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior, of_accelerator
from plumbline.devices.types import backend_of, device_type
from plumbline.launch.this_machine import why_too_many
from plumbline.planning.declaration import Declaration, Refusal
from plumbline.planning.devices import MeshChoice
from plumbline.results.records import PERFORMANCE
from plumbline.workloads import EVERY, WORKLOADS, PerformanceWorkload, Workload

COUNTS = (1, 2, 3, 4, 8)
"""Numbers of devices to try. 3 reveals mistakes that powers of two hide."""


def topologies(gpus: int, nodes: int | None = None) -> list[Topology]:
    """Return topologies of up to ``gpus`` devices: ``COUNTS`` and ``gpus`` itself, on one node or evenly on several.

    With ``nodes``, ``gpus`` is per node, and the largest topology is ``nodes`` × ``gpus``.
    """
    if gpus < 1:
        raise PlanError(f"--gpus {gpus}: must be 1 or more")
    if nodes is not None and nodes < 1:
        raise PlanError(f"--nodes {nodes}: must be 1 or more")
    found = {Topology(1, count) for count in _counts(gpus)}
    if nodes is None:
        found |= _splits(gpus)
    else:
        found |= {Topology(n, g) for n in {1, min(2, nodes), nodes} for g in {min(2, gpus), gpus}}
    return sorted(found, key=lambda topology: (topology.devices, topology.num_nodes))


def _splits(gpus: int) -> set[Topology]:
    # More than two nodes with one device each would show nothing new.
    found = {Topology(2, 1)} if gpus >= 2 else set()
    for devices in _counts(gpus):
        found |= {Topology(n, devices // n) for n in range(2, devices) if devices % n == 0 and devices // n > 1}
    return found


def _counts(limit: int) -> list[int]:
    return sorted({count for count in COUNTS if count <= limit} | {limit})


def is_worth_a_cell(
    workload: Workload,
    backend: Backend,
    topology: Topology,
    precision: str,
    planned: Sequence[Topology],
    stages_per_rank: int = 1,
) -> bool:
    """Return whether a combination can show a fault that a smaller one of the ``planned`` topologies cannot show.

    If the trainer chooses its backend itself, one topology is enough. The training of an elastic workload begins on a
    different topology, which the backend must fit as well.
    """
    if isinstance(workload, PerformanceWorkload):
        return _is_worth_timing(workload, backend, topology, precision, planned)
    if not (backend.opt_in if workload.experts else not backend.divides_experts):
        return False
    small = [t for t in planned if t.num_nodes == 1 and t.gpus <= 3]
    if backend.chosen_by_trainer:
        return topology == small[1] and not workload.narrow
    if workload.elastic and not backend.fits(resized(topology, backend)):
        return False
    return not workload.narrow or (
        precision in workload.precisions and topology in _narrow(backend, small, stages_per_rank)
    )


def is_sampled(workload: Workload, backend: Backend, topology: Topology, precision: str) -> bool:
    """Return whether a cell is one of the few that are planned for a sampled backend.

    These cells use float32, on the smallest topology and on the smallest one where each dimension has several devices.
    Narrow workloads are included only if they couple stages.
    """
    if isinstance(workload, PerformanceWorkload) or (workload.narrow and not workload.couples_stages):
        return False
    return precision == "32" and topology in (backend.smallest, backend.smallest_whole)


def is_sampled_precision(
    workload: Workload, backend: Backend, topology: Topology, precision: str, planned: Sequence[Topology]
) -> bool:
    """Return whether a cell is one of the few that are planned for a sampled precision.

    These cells have the workloads that name the precision, on one topology with several devices per backend.
    """
    small = [t for t in planned if t.num_nodes == 1 and t.gpus <= 3]
    chosen = small[-1] if backend.smallest in small else backend.smallest
    return precision in workload.precisions and topology == chosen and topology.devices > 1


def _narrow(backend: Backend, small: Sequence[Topology], stages_per_rank: int) -> set[Topology]:
    """Return the topologies of narrow workloads: the first and the last of ``small``.

    ``small`` has the planned topologies of one node with up to three devices, in ascending order. The backend's
    smallest topology is added if it is not in ``small``, or if few workloads suit the backend: many stages, for
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
    """Return whether a cell is measured.

    The topologies are those of one node with the largest number of devices or a power of two, and the largest topology
    of several nodes. A workload's first precision is measured on all of them, other precisions only on the smallest one
    of each backend. A backend that the trainer chooses itself is another name for one that is already measured.
    """
    if backend.chosen_by_trainer or precision not in workload.precisions:
        return False
    if workload.backends is not None and backend.name not in workload.backends:
        return False
    timed = [one for one in _timed(workload, backend, planned) if backend.fits(one)]
    return topology in (timed if precision == workload.precisions[0] else timed[:1])


def _timed(workload: PerformanceWorkload, backend: Backend, planned: Sequence[Topology]) -> list[Topology]:
    single = [t for t in planned if t.num_nodes == 1]
    largest = max(t.gpus for t in single)
    timed = [t for t in single if t.gpus == largest or t.gpus & (t.gpus - 1) == 0]
    if backend.name in workload.on_nodes:
        several = [t for t in planned if t.num_nodes > 1 and t.gpus > 1]
        timed += sorted(several, key=lambda t: (t.devices, t.gpus))[-1:]
    return timed


SMOKE_PRECISION = "32"
SMOKE_WORKLOADS = ("mlp", "adamw", "cnn-batchnorm")


def smoke_workload(backend: Backend, stages_per_rank: int = 1) -> str:
    """Return the workload to try first on a backend: the simplest one that has a block for each stage."""
    if backend.divides_experts or backend.divides_sequences:
        return "experts" if backend.divides_experts else "transformer"
    stages = len(backend.replicas(backend.smallest)[0]) * stages_per_rank
    return next((name for name in SMOKE_WORKLOADS if (WORKLOADS[name].blocks or 0) >= stages), SMOKE_WORKLOADS[0])


@dataclass(frozen=True)
class Matrix:
    """The user's selection. None selects everything.

    Without ``nodes``, ``gpus`` counts devices over all nodes; otherwise, per node. ``shared`` is the number of
    devices if ranks share them. If there are ``meshes``, no other topologies are planned.
    """

    gpus: int
    nodes: int | None = None
    backends: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    workloads: tuple[str, ...] | None = None
    accelerator: str = "cpu"
    seed: int | None = None
    shared: int | None = None
    meshes: tuple[MeshChoice, ...] = ()

    @property
    def topologies(self) -> list[Topology]:
        if self.meshes:
            return self._topologies_of(self.meshes)
        return topologies(self.gpus, self.nodes)

    def topologies_for(self, backend: Backend) -> list[Topology]:
        if not self.meshes:
            return list(filter(backend.fits, self.topologies))
        return self._topologies_of(mesh for mesh in self.meshes if mesh.backend == backend.name)

    def _topologies_of(self, meshes: Iterable[MeshChoice]) -> list[Topology]:
        return list(dict.fromkeys(mesh.topology(self.nodes or 1) for mesh in meshes))

    def refusal(self, cell: Cell, behavior: TrainingBehavior) -> Refusal | None:
        """Return why a trainer with this ``behavior`` cannot train ``cell`` on shared devices, None if it can.

        The replicas of one process cannot share a device: torch's DataParallel would give some of them the same
        buffers, and a correct trainer would fail.
        """
        if self.shared is None or cell.accelerator == "cpu":
            return None
        if behavior.needs_own_devices and cell.processes > 1:
            return Refusal(
                f"{cell.subject} declares devices='own' for backend {cell.backend!r}: each rank needs "
                f"{device_type(cell.accelerator).one}, so run it without --oversubscribe"
            )
        replicas = cell.parallelism.devices_per_process(cell.topology)
        if replicas <= self.shared:
            return None
        return Refusal(
            f"{cell.backend} on {cell.topology} has {replicas} replicas in one rank, which need "
            f"{device_type(cell.accelerator).one} each even with --oversubscribe; this machine has {self.shared}"
        )

    def includes(self, backend: Backend, declared: Declaration) -> bool:
        """Return whether a backend is planned for a subject. An opt-in backend must be declared or selected."""
        return not backend.opt_in or backend.name in declared.backends or bool(self.backends) or bool(self.meshes)

    def precisions_for(self, declared: Declaration) -> list[str]:
        """Return the precisions that are planned for a subject. An opt-in precision must be declared or named."""
        names = _known("precision", self.precisions, PRECISIONS)
        offered = of_accelerator(declared.precisions, self.accelerator)
        return [name for name in names if not PRECISIONS[name].opt_in or name in offered or self.precisions]


@dataclass(frozen=True)
class Planned:
    """A cell of the plan, with the behavior that its subject declares.

    ``refusal`` says why the cell is not trained, None if it is. ``undeclared`` lists what the cell needs but its
    subject does not declare.
    """

    cell: Cell
    refusal: str | None
    behavior: TrainingBehavior = ORDINARY
    undeclared: tuple[str, ...] = ()

    @property
    def declined(self) -> Finding:
        assert self.refusal is not None
        check = PERFORMANCE if isinstance(EVERY[self.cell.workload], PerformanceWorkload) else "declared"
        return Finding(check, Outcome.UNSUPPORTED, self.refusal, undeclared=self.undeclared)

    @property
    def is_smoke(self) -> bool:
        own = self.cell.parallelism
        return (
            self.refusal is None
            and self.cell.precision == SMOKE_PRECISION
            and self.cell.workload == smoke_workload(own, self.behavior.stages_per_rank)
            and self.cell.topology in {own.smallest, *(one.smallest for one in BACKENDS.values() if not one.opt_in)}
        )


def plan(matrix: Matrix, subjects: Sequence[Declaration], among: Mapping[str, Workload] = WORKLOADS) -> list[Planned]:
    """Return every cell of the matrix in the order of its topologies, including refused ones.

    ``among`` has the workloads of the suite, by name.
    """
    backends = [BACKENDS[name] for name in _known("backend", matrix.backends, BACKENDS)]
    workloads = [EVERY[name] for name in _known("workload", matrix.workloads, EVERY) if name in among]
    _refuse_namesakes(subjects)
    sizes = matrix.topologies
    names = dict.fromkeys(declared.name for declared in subjects)
    fitting = {backend.name: matrix.topologies_for(backend) for backend in backends}
    planned = []
    for topology, name, backend in product(sizes, names, backends):
        declared = declared_for(name, backend.name, subjects)
        if topology not in fitting[backend.name] or not matrix.includes(backend, declared):
            continue
        sampled = backend.sampled and not matrix.meshes and backend.name not in (matrix.backends or ())
        for workload, precision in product(workloads, matrix.precisions_for(declared)):
            if sampled and not is_sampled(workload, backend, topology, precision):
                continue
            few = PRECISIONS[precision].sampled and not (matrix.precisions or matrix.meshes)
            if few and not is_sampled_precision(workload, backend, topology, precision, sizes):
                continue
            per_rank = declared.behavior.stages_per_rank
            if matrix.meshes or is_worth_a_cell(workload, backend, topology, precision, sizes, per_rank):
                cell = Cell(
                    name, workload.name, backend.name, topology, precision, matrix.accelerator, matrix.seed,
                    workload.locator,
                )  # fmt: skip
                one = _planned(cell, matrix, declared)
                # A refused cell of a sampled backend counts only if the subject did not declare something: otherwise
                # the workload rules it out, which says nothing about the subject.
                if not sampled or one.refusal is None or one.undeclared:
                    planned.append(one)
    return planned


def _planned(cell: Cell, matrix: Matrix, declared: Declaration) -> Planned:
    refusal = declared.refusal(cell) or matrix.refusal(cell, declared.behavior)
    if refusal is None:
        return Planned(cell, None, declared.behavior)
    return Planned(cell, refusal.sentence, declared.behavior, refusal.undeclared)


def _refuse_namesakes(subjects: Sequence[Declaration]) -> None:
    # A trainer can have several declarations behind one locator, each for different backends.
    for index, one in enumerate(subjects):
        for other in subjects[:index]:
            both = set(one.backends) & set(other.backends)
            if one.name == other.name and (both or one.locator != other.locator):
                raise PlanError(f"two subjects are named {one.name!r}: rename one")


def _known(what: str, wanted: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    known = list(known)
    if wanted is None:
        return known
    for name in wanted:
        if name not in known:
            raise unknown_name(what, name, known)
    return list(dict.fromkeys(wanted))


def check_ranks(matrix: Matrix) -> None:
    """Check that this machine can hold the ranks of a matrix."""
    sizes = [math.prod(one.sizes) for one in matrix.meshes] or [matrix.gpus * (matrix.nodes or 1)]
    if why := why_too_many(max(sizes)):
        raise PlanError(why)


def check_devices(matrix: Matrix, present: int, *, oversubscribe: bool) -> None:
    """Check that there are enough devices for a matrix, and that they can communicate."""
    wanted = max((topology.devices for topology in matrix.topologies), default=0)
    if matrix.accelerator != "cpu" and wanted > present and not oversubscribe:
        nodes = min(matrix.nodes or 1, max(present, 1))
        fewer = f"--gpus {max(present // nodes, 1)}" + (f" --nodes {nodes}" if matrix.nodes else "")
        raise PlanError(
            f"{wanted} devices are needed, but this machine has {present}: use {fewer}, simulate devices with "
            "--accelerator cpu, or share them with --oversubscribe"
        )
    if wanted > 1 and backend_of(matrix.accelerator, shared=oversubscribe) is None:
        raise PlanError(
            f"torch has no communication backend for {device_type(matrix.accelerator).label} devices, so {wanted} of "
            "them cannot train together: use --gpus 1, or simulate devices with --accelerator cpu"
        )
