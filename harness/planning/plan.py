"""From what was asked for to the cells that answer it. Pure: nothing is started here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.backend import BACKENDS, declared_for, resized
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.precision import PRECISIONS
from harness.core.software import UNKNOWN, Software
from harness.core.topology import Topology
from harness.core.training_behavior import ORDINARY, TrainingBehavior
from harness.results.records import PERFORMANCE
from harness.workloads import EVERY, WORKLOADS, PerformanceWorkload, Workload

COUNTS = (1, 2, 3, 4, 8)
"""Device counts that are tried within a budget: 3 because mistakes hide behind powers of two."""

DEFAULT_GPUS = 4


@dataclass(frozen=True)
class Matrix:
    """What the user asked for. None: everything there is.

    Without ``nodes``, ``gpus`` is a budget of devices over all nodes; with it, the gpus of each node. ``shared`` is how
    many CUDA devices there are where ranks share them, else None.
    """

    gpus: int
    nodes: int | None = None
    backends: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    workloads: tuple[str, ...] | None = None
    accelerator: str = "cpu"
    seed: int | None = None
    shared: int | None = None

    def refusal(self, cell: Cell) -> str | None:
        """Return why ``cell`` cannot be trained on shared devices, in a sentence, or None if it can.

        Replicas of one process cannot share a device: torch's DataParallel then gives some of them the same buffers,
        and a right trainer would be found wrong.
        """
        replicas = cell.contract.devices_per_process(cell.topology)
        if self.shared is None or cell.accelerator != "cuda" or replicas <= self.shared:
            return None
        return (
            f"--oversubscribe lets ranks share a CUDA device, and {cell.backend} on {cell.topology} has {replicas} "
            f"replicas in one rank: {self.shared} CUDA devices are here"
        )


@dataclass(frozen=True)
class Declaration:
    """What a subject said of itself, and the locator it was found by; ``precisions`` by accelerator."""

    name: str
    locator: str
    backends: tuple[str, ...]
    precisions: Mapping[str, Sequence[str]]
    capabilities: frozenset[str]
    software: Software = UNKNOWN
    launch: str = "rank"
    behavior: TrainingBehavior = ORDINARY

    @classmethod
    def of(cls, locator: str, values: Mapping[str, Any]) -> Declaration:
        """Take over what the pool behind ``locator`` says of one of its subjects."""
        return cls(
            name=values["name"],
            locator=locator,
            backends=tuple(values["backends"]),
            precisions=values["precisions"],
            capabilities=frozenset(values["capabilities"]),
            software=Software(**values["software"]),
            launch=values["launch"],
            behavior=TrainingBehavior.of(values["conduct"]),
        )

    def undeclared(self, cell: Cell) -> tuple[str, ...]:
        """Return what ``cell`` needs and the subject does not declare: its backend, precision, or capabilities."""
        if cell.backend not in self.backends:
            return (f"backend {cell.backend}",)
        if cell.precision not in self.precisions[cell.accelerator]:
            return (f"precision {cell.precision}",)
        workload = EVERY[cell.workload]
        nodes, most = cell.topology.num_nodes, self.behavior.max_nodes
        return (
            *sorted(workload.needs - self.capabilities),
            *((f"{nodes} nodes",) if most is not None and nodes > most else ()),
            *(("epochs",) if self.behavior.by_iterations and workload.needs_epochs else ()),
        )

    def refusal(self, cell: Cell) -> str | None:
        """Return why the subject does not do ``cell``, in a sentence, or None if it does."""
        if cell.backend not in self.backends:
            return f"{self.name} does not declare backend {cell.backend!r}"
        if cell.precision not in self.precisions[cell.accelerator]:
            return f"{self.name} does not declare precision {cell.precision!r} on {cell.accelerator}"
        workload = EVERY[cell.workload]
        most = self.behavior.max_nodes
        if most is not None and cell.topology.num_nodes > most:
            return f"{self.name} declares max_nodes={most}, and this cell has {cell.topology.num_nodes} nodes"
        if self.behavior.by_iterations and workload.needs_epochs:
            return f"{self.name} declares data='iterations', and {cell.workload} {workload.needs_epochs}"
        if missing := self.undeclared(cell):
            return f"{self.name} does not declare {', '.join(missing)}, which {cell.workload} needs"
        if self.launch == "node" and isinstance(workload, PerformanceWorkload):
            return f"{self.name} starts its ranks by itself: they can be examined, but not timed"
        if workload.gloo_only and cell.accelerator == "cuda" and cell.processes > 1:
            return workload.gloo_only
        return None


@dataclass(frozen=True)
class Planned:
    """A cell of the plan; ``refusal`` says why its subject does not do it, None if it does.

    ``behavior`` is what its subject declares of its way of training, by which it is judged. ``undeclared`` is what the
    cell needs and the subject does not declare.
    """

    cell: Cell
    refusal: str | None
    behavior: TrainingBehavior = ORDINARY
    undeclared: tuple[str, ...] = ()

    @property
    def declined(self) -> Finding:
        """The finding about a cell that is refused: nothing is trained."""
        assert self.refusal is not None
        check = PERFORMANCE if isinstance(EVERY[self.cell.workload], PerformanceWorkload) else "declared"
        return Finding(check, Outcome.UNSUPPORTED, self.refusal, undeclared=self.undeclared)

    @property
    def is_smoke(self) -> bool:
        """Whether the cell is in the small selection that touches every backend in a few seconds."""
        return (
            self.refusal is None
            and self.cell.workload == "mlp"
            and self.cell.precision == "32"
            and self.cell.topology in (Topology(1, 1), Topology(1, 2), Topology(2, 2))
        )


def plan(matrix: Matrix, subjects: Sequence[Declaration], among: Mapping[str, Workload] = WORKLOADS) -> list[Planned]:
    """Return every cell of the matrix, small topologies first; what a subject does not do is in it, refused.

    ``among`` are the workloads that the suite is about, by name.

    Raises:
        PlanError: a name is unknown, or two subjects share one.
    """
    backends = _known("backend", matrix.backends, BACKENDS)
    precisions = _known("precision", matrix.precisions, PRECISIONS)
    workloads = [name for name in _known("workload", matrix.workloads, EVERY) if name in among]
    _refuse_namesakes(subjects)
    planned = topologies(matrix.gpus, matrix.nodes)
    return [
        Planned(cell, declared.refusal(cell) or matrix.refusal(cell), declared.behavior, declared.undeclared(cell))
        for topology in planned
        for name in dict.fromkeys(declared.name for declared in subjects)
        for backend in backends
        for declared in [declared_for(name, backend, subjects)]
        if not BACKENDS[backend].rare or backend in declared.backends or matrix.backends
        if BACKENDS[backend].fits(topology)
        for workload in workloads
        for precision in precisions
        if _worth_a_cell(EVERY[workload], backend, topology, precision, planned)
        for cell in [Cell(name, workload, backend, topology, precision, matrix.accelerator, matrix.seed)]
    ]


def _refuse_namesakes(subjects: Sequence[Declaration]) -> None:
    """Refuse one name for two trainers. One trainer's declarations come from one place, each for other backends."""
    for place, one in enumerate(subjects):
        for other in subjects[:place]:
            both = set(one.backends) & set(other.backends)
            if one.name == other.name and (both or one.locator != other.locator):
                raise PlanError(f"two subjects are called {one.name!r}: a report could not tell them apart, rename one")


def _worth_a_cell(
    workload: Workload, backend: str, topology: Topology, precision: str, planned: Sequence[Topology]
) -> bool:
    """Say whether a cell of the matrix asks something that no smaller one does.

    ``auto`` asks which backend a trainer chooses by itself: one topology answers. A narrow workload asks for one
    device, three (or as many as there are), and for ddp2 two nodes of two. An elastic one needs another number of
    devices to have come from.
    """
    if isinstance(workload, PerformanceWorkload):
        return _worth_timing(workload, backend, topology, precision, planned)
    single = [t for t in planned if t.num_nodes == 1 and t.gpus <= 3]
    if backend == "auto":
        return topology == single[1] and not workload.narrow
    if workload.elastic and not BACKENDS[backend].fits(resized(topology, BACKENDS[backend])):
        return False
    if not workload.narrow:
        return True
    return precision in workload.precisions and (
        topology in (single[0], single[-1]) or (topology == Topology(2, 2) and backend == "ddp2")
    )


def _worth_timing(
    workload: PerformanceWorkload, backend: str, topology: Topology, precision: str, planned: Sequence[Topology]
) -> bool:
    """Say whether a cell is to be measured: powers of two on one node, and the most devices on several.

    Precisions after a workload's first are measured on the smallest topology of each backend: what they cost or gain
    is a matter of the device. ``auto`` is another name for something that is measured already.
    """
    largest = max(t.gpus for t in planned if t.num_nodes == 1)
    places = [t for t in planned if t.num_nodes == 1 and (t.gpus == largest or t.gpus & (t.gpus - 1) == 0)]
    several = [t for t in planned if t.num_nodes > 1 and t.gpus > 1 and backend in workload.on_nodes]
    places += sorted(several, key=lambda t: (t.devices, t.gpus))[-1:]
    if backend == "auto" or backend not in (workload.backends or BACKENDS):
        return False
    first = next((place for place in places if BACKENDS[backend].fits(place)), None)
    return topology in (places if precision == workload.precisions[0] else [first]) and precision in workload.precisions


def topologies(gpus: int, nodes: int | None = None) -> list[Topology]:
    """Return the topologies of a budget: device counts up to ``gpus`` and their splits into nodes.

    With ``nodes``, ``gpus`` is per node, and the largest topology is ``nodes`` × ``gpus``.

    Raises:
        PlanError: a number is not positive.
    """
    if gpus < 1:
        raise PlanError(f"--gpus {gpus}: at least one device is needed")
    if nodes is None:
        found = {Topology(1, count) for count in _counts(gpus)}
        for count in _counts(gpus):
            found |= {
                Topology(n, count // n)
                for n in range(2, count)
                if count % n == 0 and count // n > 1  # one gpu a node says nothing that 2x1 does not
            }
        if gpus >= 2:
            found.add(Topology(2, 1))
    else:
        if nodes < 1:
            raise PlanError(f"--nodes {nodes}: at least one node is needed")
        found = {Topology(1, count) for count in _counts(gpus)}
        found |= {Topology(n, g) for n in _counts(nodes) for g in {min(2, gpus), gpus} if n in (1, 2, nodes)}
    return sorted(found, key=lambda topology: (topology.devices, topology.num_nodes))


def _counts(limit: int) -> list[int]:
    return sorted({count for count in COUNTS if count <= limit} | {limit})


def _known(what: str, wanted: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    known = list(known)
    if wanted is None:
        return known
    for name in wanted:
        if name not in known:
            close = " or ".join(map(repr, difflib.get_close_matches(name, known, 2)))
            hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
            raise PlanError(f"there is no {what} {name!r}: {hint}")
    return list(dict.fromkeys(wanted))


def check_devices(matrix: Matrix, present: int, *, oversubscribe: bool) -> None:
    """Refuse a matrix that needs more CUDA devices than there are.

    Raises:
        PlanError: with the ways out.
    """
    wanted = matrix.gpus * (matrix.nodes or 1)
    if matrix.accelerator == "cuda" and wanted > present and not oversubscribe:
        nodes = min(matrix.nodes or 1, max(present, 1))
        fewer = f"--gpus {max(present // nodes, 1)}" + (f" --nodes {nodes}" if matrix.nodes else "")
        raise PlanError(
            f"{wanted} devices were asked for and {present} CUDA devices are here: take {fewer}, "
            f"simulate them with --accelerator cpu, or let ranks share devices with --oversubscribe"
        )
