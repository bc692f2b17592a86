"""The backends of trainers: how each arranges devices, and which device computes what.

A new backend is an entry of ``BACKENDS``, here or with ``BACKENDS.register`` elsewhere. Planning, launching, the judge
and the reports take everything that differs between backends from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Protocol, TypeVar

from plumbline.core.mesh import HeldPart, Mesh
from plumbline.core.named_registry import NamedRegistry
from plumbline.core.topology import Topology


class Held(Enum):
    """What devices can hold in whole or in parts."""

    SAMPLES = "samples"
    SEQUENCE = "sequence"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    EXPERTS = "experts"


MODEL = frozenset({Held.PARAMETERS, Held.GRADIENTS, Held.OPTIMIZER_STATE})
"""What is split if each device has a part of the model: shards of tensors, or whole layers."""


nodes: Callable[[Topology], int] = attrgetter("num_nodes")
gpus: Callable[[Topology], int] = attrgetter("gpus")
devices: Callable[[Topology], int] = attrgetter("devices")


def innermost(topology: Topology) -> int:
    """Return the size of the innermost dimension: the devices of a node; on one node, their smallest prime factor."""
    return topology.gpus if topology.num_nodes > 1 else _factor(topology.gpus)


def outermost(topology: Topology) -> int:
    """Return the size of the outer of two dimensions: the number of groups of the inner one."""
    return topology.devices // innermost(topology)


def middle(topology: Topology) -> int:
    """Return the size of the middle one of three dimensions: the smallest prime factor of the outermost size."""
    return _factor(outermost(topology))


def above_middle(topology: Topology) -> int:
    return outermost(topology) // middle(topology)


def _factor(count: int) -> int:
    return next((n for n in range(2, count) if count % n == 0), 1)


def stages(topology: Topology) -> int:
    """Return the number of stages of a pipeline: one per device of a node or, if nodes have one device, per node."""
    return topology.gpus if topology.gpus > 1 else topology.num_nodes


def pipelines(topology: Topology) -> int:
    """Return the number of replicas of a pipeline: one per node that holds all stages."""
    return topology.devices // stages(topology)


@dataclass(frozen=True)
class Dimension:
    """One dimension of a backend's mesh; ``size`` returns its default number of devices on a topology.

    Each device along it holds a part of what is in ``splits``, and the whole of everything else. ``local``: one process
    drives them, gathers their outputs and computes one loss. ``optional``: its size may be 1.
    """

    name: str
    size: Callable[[Topology], int]
    splits: frozenset[Held] = frozenset({Held.SAMPLES})
    local: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Backend:
    """One ``distributed_backend`` of a trainer.

    Trainers differentiate the mean of the losses of :meth:`loss_ranks`.

    Args:
        name: the name that users type.
        dimensions: the dimensions of its mesh, outermost first and local ones last. Empty: a single device.
        column: its column in the support table. Several backends may share one. None: it has none.
        opt_in: plan its cells only for a subject that declares it, or if the user names it.
        chosen_by_trainer: the trainer gets no backend and chooses this one itself. One topology is tried.
        sampled: plan a few of its cells only, unless the user names it.
        micro_batches: each of :meth:`loss_ranks` divides its batch into this many equal parts. Their losses are
            averaged as in gradient accumulation.
        sequence_pieces: each rank holds this many equal pieces of a sequence. None: one piece, of any size.
    """

    name: str
    dimensions: tuple[Dimension, ...] = ()
    column: str | None = None
    opt_in: bool = False
    chosen_by_trainer: bool = False
    sampled: bool = False
    micro_batches: int = 1
    sequence_pieces: int | None = None

    def device_mesh(self, topology: Topology) -> Mesh:
        return Mesh(tuple((one.name, size) for one, size in self._sized(topology)))

    def mesh(self, topology: Topology) -> Mesh:
        """Return how the ranks are arranged: the mesh of the devices without local dimensions."""
        return Mesh(tuple((one.name, size) for one, size in self._sized(topology) if not one.local))

    def fits(self, topology: Topology) -> bool:
        """Return whether the mesh has all devices of the topology, and several along each required dimension."""
        if topology.mesh and (self.gathers or len(topology.mesh) != len(self.dimensions)):
            return False
        several = all(one.optional or size > 1 for one, size in self._sized(topology))
        return several and self.device_mesh(topology).size == topology.devices

    @cached_property
    def smallest(self) -> Topology:
        """The topology with the fewest devices, and then the fewest nodes, on which this backend fits."""
        return next(filter(self.fits, _by_size()))

    @cached_property
    def smallest_whole(self) -> Topology:
        """The smallest topology on which every dimension has several devices, including optional ones."""
        required = replace(self, dimensions=tuple(replace(one, optional=False) for one in self.dimensions))
        return required.smallest

    def processes(self, topology: Topology) -> int:
        """Return the world size: ranks over all nodes."""
        return self.mesh(topology).size

    def processes_per_node(self, topology: Topology) -> int:
        return max(1, self.processes(topology) // topology.num_nodes)

    def devices_per_process(self, topology: Topology) -> int:
        return max(1, topology.devices // self.processes(topology))

    @property
    def divides_layers(self) -> bool:
        """Whether several devices that see the same samples compute parts of each layer."""
        together = (one.splits for one in self.dimensions if Held.SAMPLES not in one.splits)
        return self.micro_batches == 1 and any(Held.PARAMETERS in splits for splits in together)

    @property
    def has_stages(self) -> bool:
        """Whether each device has whole layers, through which micro-batches pass one after another."""
        together = (one.splits for one in self.dimensions if Held.SAMPLES not in one.splits)
        return self.micro_batches > 1 and any(Held.PARAMETERS in splits for splits in together)

    @property
    def divides_experts(self) -> bool:
        return any(Held.EXPERTS in one.splits for one in self.dimensions)

    @property
    def divides_sequences(self) -> bool:
        return any(Held.SEQUENCE in one.splits for one in self.dimensions)

    @property
    def gathers(self) -> bool:
        """Whether one process drives several devices and gathers their outputs."""
        return any(one.local for one in self.dimensions)

    def part(self, rank: int, topology: Topology, of: Held = Held.SAMPLES) -> HeldPart:
        """Return which part a rank holds, for example of the samples of a step; part 0 of 1 if it holds all."""
        return self.mesh(topology).part(rank, *self._splitting(of))

    def reduction_groups(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks over which gradients are reduced: they see different samples or sequence parts."""
        return self.mesh(topology).groups(*self._splitting(Held.SAMPLES, Held.SEQUENCE))

    def norm_groups(self, topology: Topology, of: Held = Held.GRADIENTS) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks whose squared norms add up to that of the whole gradient.

        Shards of one gradient are in one group. A rank with a replicated gradient is alone in its group.
        """
        return self.mesh(topology).groups(*self._splitting(of))

    def loss_ranks(self, topology: Topology) -> tuple[int, ...]:
        """Return the first rank of each group that sees the same samples, and so computes the same loss."""
        return tuple(group[0] for group in self.replicas(topology))

    def holders(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that hold one model together."""
        return self.mesh(topology).groups(*self._splitting(Held.PARAMETERS, Held.EXPERTS))

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that see the same samples and hold one model together."""
        same = [one.name for one in self.dimensions if Held.SAMPLES not in one.splits]
        return self.mesh(topology).groups(*same)

    def _sized(self, topology: Topology) -> Iterator[tuple[Dimension, int]]:
        sizes = topology.mesh or tuple(one.size(topology) for one in self.dimensions)
        return zip(self.dimensions, sizes, strict=True)

    def _splitting(self, *held: Held) -> tuple[str, ...]:
        return tuple(one.name for one in self.dimensions if not one.splits.isdisjoint(held))


_REPLICAS = Dimension("replica", gpus, local=True)
_DP = Backend("dp", (_REPLICAS,), "DP")

BACKENDS: NamedRegistry[Backend] = NamedRegistry(
    "backend",
    (
        Backend("none"),
        # The trainer is given several gpus and no backend. It chooses one that does what dp does.
        replace(_DP, name="auto", opt_in=True, chosen_by_trainer=True),
        _DP,
        Backend("ddp", (Dimension("replicate", devices),), "DDP"),
        Backend("ddp2", (Dimension("replicate", nodes), _REPLICAS), "DDP2"),
        # As ddp, but ranks shard weights, gradients and the optimizer's state; only that state; or that state and the
        # gradients.
        Backend("fsdp", (Dimension("shard", devices, MODEL | {Held.SAMPLES}),), "FSDP", opt_in=True),
        Backend(
            "zero", (Dimension("shard", devices, frozenset({Held.SAMPLES, Held.OPTIMIZER_STATE})),), "ZeRO", opt_in=True
        ),
        Backend(
            "zero2",
            (Dimension("shard", devices, frozenset({Held.SAMPLES, Held.GRADIENTS, Held.OPTIMIZER_STATE})),),
            "ZeRO-2",
            opt_in=True,
        ),
        # Shards within each group of devices, replicas over the groups.
        Backend(
            "hsdp",
            (Dimension("replicate", outermost), Dimension("shard", innermost, MODEL | {Held.SAMPLES})),
            "HSDP",
            opt_in=True,
        ),
        # Ranks hold a part of each layer and see the same samples.
        Backend("tp", (Dimension("tp", devices, MODEL),), "TP", opt_in=True),
        Backend(
            "ddp+tp", (Dimension("replicate", outermost), Dimension("tp", innermost, MODEL)), "DDP+TP", opt_in=True
        ),
        Backend(
            "fsdp+tp",
            (Dimension("shard", outermost, MODEL | {Held.SAMPLES}), Dimension("tp", innermost, MODEL)),
            "FSDP+TP",
            opt_in=True,
        ),
        # Tensor parallelism within the innermost groups, shards over these, and replicas over the shards.
        Backend(
            "hsdp+tp",
            (
                Dimension("replicate", above_middle),
                Dimension("shard", middle, MODEL | {Held.SAMPLES}),
                Dimension("tp", innermost, MODEL),
            ),
            "HSDP+TP",
            opt_in=True,
        ),
        # Ranks have the whole model and a part of each sequence.
        Backend("sp", (Dimension("sp", devices, frozenset({Held.SEQUENCE})),), "SP", opt_in=True),
        # As sp, by exchanging keys and values in attention. Each rank has an early and a late piece of a sequence,
        # because late queries see more keys.
        Backend("cp", (Dimension("cp", devices, frozenset({Held.SEQUENCE})),), "CP", opt_in=True, sequence_pieces=2),
        # As ddp, but ranks hold different experts.
        Backend("ep", (Dimension("ep", devices, frozenset({Held.SAMPLES, Held.EXPERTS})),), "EP", opt_in=True),
        # Each rank holds some of the layers, and all see the same samples.
        Backend("pp", (Dimension("stage", devices, MODEL),), "PP", opt_in=True, micro_batches=4),
        # As pp, with replicas. The trainer decides which rank holds which layers.
        Backend(
            "balanced",
            (Dimension("replicate", pipelines, optional=True), Dimension("stage", stages, MODEL)),
            "Balanced",
            opt_in=True,
            sampled=True,
            micro_batches=2,
        ),
    ),
)


def smoke_order() -> list[Backend]:
    """Return all backends, the most informative first.

    First those with a process per device, then replicas in one process, the trainer's own choice, and one device.
    """
    return sorted(BACKENDS.values(), key=lambda one: (not one.dimensions, one.chosen_by_trainer, one.gathers))


def columns() -> dict[str, bool]:
    """Return the backend columns of the support table, each with whether all backends that share it are opt-in."""
    opt_in: dict[str, bool] = {}
    for backend in BACKENDS.values():
        if backend.column is not None:
            opt_in[backend.column] = opt_in.get(backend.column, True) and backend.opt_in
    return opt_in


def resized(topology: Topology, backend: Backend) -> Topology:
    """Return another topology: with fewer gpus per node, or one node fewer; if the backend fits none, with more gpus.

    If the mesh has several dimensions, the sizes of the two inner ones are exchanged or, if they are equal, the inner
    one grows by one.
    """
    nodes, gpus = topology.num_nodes, topology.gpus
    sizes = backend.mesh(topology).shape
    if len(sizes) > 1 and min(sizes) > 1:
        *others, outer, inner = sizes
        mesh = (*others, outer, inner + 1) if outer == inner else (*others, inner, outer)
        nodes = nodes if prod(mesh) % nodes == 0 else 1
        return Topology(nodes, prod(mesh) // nodes, mesh)
    fewer = [Topology(nodes, count) for count in range(gpus - 1, 0, -1)]
    fewer += [Topology(nodes - 1, gpus)] if nodes > 1 else []
    more = (Topology(nodes, gpus + count) for count in range(1, gpus + 1))
    return next(filter(backend.fits, (*fewer, *more)), Topology(nodes, gpus + 1))


def _by_size() -> Iterator[Topology]:
    for count in range(1, 1025):
        yield from (Topology(n, count // n) for n in range(1, count + 1) if count % n == 0)


class Declared(Protocol):
    """A declaration of some of a trainer's backends."""

    @property
    def name(self) -> str:
        """The trainer's name."""

    @property
    def backends(self) -> Sequence[str]: ...


D = TypeVar("D", bound=Declared)


def declared_for(name: str, backend: str, declared: Sequence[D]) -> D:
    """Return a trainer's declaration for a backend, or its first declaration if it has none for it."""
    own = [one for one in declared if one.name == name]
    return next((one for one in own if backend in one.backends), own[0])
