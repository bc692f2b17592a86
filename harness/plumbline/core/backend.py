"""The backends a trainer may offer: how each of them arranges devices, and what it promises about who computes what.

A backend is one object. Planning, launching, the judge and the reports ask it everything that differs by backend; a new
one is an entry of ``BACKENDS``, here or by ``BACKENDS.register`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Protocol, TypeVar

from plumbline.core.mesh import HeldPart, Mesh
from plumbline.core.named_registry import NamedRegistry
from plumbline.core.topology import Topology


class Held(Enum):
    """What devices hold of a training: all of it, or a part each."""

    SAMPLES = "samples"
    SEQUENCE = "sequence"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    EXPERTS = "experts"


MODEL = frozenset({Held.PARAMETERS, Held.GRADIENTS, Held.OPTIMIZER_STATE})
"""What is split where a device has a part of the model: shards of tensors, or whole layers."""


def nodes(topology: Topology) -> int:
    return topology.num_nodes


def gpus(topology: Topology) -> int:
    return topology.gpus


def devices(topology: Topology) -> int:
    return topology.devices


def innermost(topology: Topology) -> int:
    """Return the size of the inner of several dimensions: a node's devices; on one node the smallest prime factor."""
    return topology.gpus if topology.num_nodes > 1 else _factor(topology.gpus)


def outermost(topology: Topology) -> int:
    """Return the size of the outer of two dimensions: how many groups of the inner one there are."""
    return topology.devices // innermost(topology)


def middle(topology: Topology) -> int:
    """Return the size of the middle one of three dimensions: the smallest prime factor of the inner groups' number."""
    return _factor(outermost(topology))


def above_middle(topology: Topology) -> int:
    return outermost(topology) // middle(topology)


def _factor(count: int) -> int:
    """Return the smallest factor of a number that is neither 1 nor the number itself, 1 where there is none."""
    return next((n for n in range(2, count) if count % n == 0), 1)


def stages(topology: Topology) -> int:
    """Return how many stages a pipeline has: one for each device of a node; where a node has one, for each node."""
    return topology.gpus if topology.gpus > 1 else topology.num_nodes


def pipelines(topology: Topology) -> int:
    """Return how many replicas of a pipeline there are: one on each node that holds all stages."""
    return topology.devices // stages(topology)


@dataclass(frozen=True)
class Dimension:
    """One dimension of a backend's mesh.

    ``size`` is its number of devices on a topology for which the user chose none. Of what it ``splits`` the devices
    along it hold a part each; of everything else they hold the same. Where it is ``local``, they are driven by one
    process, which gathers their outputs and takes one loss of them. Where it is ``optional``, its size may be 1.
    """

    name: str
    size: Callable[[Topology], int]
    splits: frozenset[Held] = frozenset({Held.SAMPLES})
    local: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Backend:
    """One ``distributed_backend`` of a trainer.

    The mean of the losses of :meth:`loss_ranks` is what is differentiated.

    Args:
        name: the name that users type.
        dimensions: the dimensions of its mesh, outermost first and local ones last. Empty: a single device.
        column: its column in the support table. Several backends may share one. None: it has none.
        opt_in: plan its cells only for a subject that declares it, or if the user names it.
        chosen_by_trainer: the trainer is told no backend and chooses this one itself. One topology is tried.
        sampled: plan a few of its cells only, unless the user names it.
        micro_batches: each of :meth:`loss_ranks` divides its batch into this many equal parts. Their losses are
            averaged as those of gradient accumulation are.
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
        """Return how the ranks are arranged: the devices' mesh without its local dimensions."""
        return Mesh(tuple((one.name, size) for one, size in self._sized(topology) if not one.local))

    def fits(self, topology: Topology) -> bool:
        """Say whether the backend does on this topology what no simpler backend does there.

        That is where each dimension that is not optional has several devices, and all devices of the topology are in
        the mesh.
        """
        if topology.mesh and (self.gathers or len(topology.mesh) != len(self.dimensions)):
            return False
        several = all(one.optional or size > 1 for one, size in self._sized(topology))
        return several and self.device_mesh(topology).size == topology.devices

    @property
    def smallest(self) -> Topology:
        """The topology with the fewest devices, and nodes, that it fits: where it is tried first."""
        return next(filter(self.fits, _by_size()))

    @property
    def smallest_whole(self) -> Topology:
        """The smallest topology on which each dimension has several devices, optional ones too."""
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
        """Whether each layer computes in parts, on several devices that see the same samples."""
        together = (one.splits for one in self.dimensions if Held.SAMPLES not in one.splits)
        return self.micro_batches == 1 and any(Held.PARAMETERS in splits for splits in together)

    @property
    def has_stages(self) -> bool:
        """Whether each device has whole layers, which the micro-batches of a batch pass one after the other."""
        together = (one.splits for one in self.dimensions if Held.SAMPLES not in one.splits)
        return self.micro_batches > 1 and any(Held.PARAMETERS in splits for splits in together)

    @property
    def divides_experts(self) -> bool:
        """Whether ranks have experts of their own."""
        return any(Held.EXPERTS in one.splits for one in self.dimensions)

    @property
    def divides_sequences(self) -> bool:
        """Whether ranks have a part of each sample's sequence."""
        return any(Held.SEQUENCE in one.splits for one in self.dimensions)

    @property
    def gathers(self) -> bool:
        """Whether a process drives several devices and gathers their outputs."""
        return any(one.local for one in self.dimensions)

    def part(self, rank: int, topology: Topology, of: Held = Held.SAMPLES) -> HeldPart:
        """Return which part a rank has, of the samples of a step for example; part 0 of 1 where it has all."""
        return self.mesh(topology).part(rank, *self._splitting(of))

    def reduction_groups(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks over which a gradient is reduced, each rank's for the part that it holds.

        These ranks differ in what they computed it from: their samples, or their parts of each sequence.
        """
        return self.mesh(topology).groups(*self._splitting(Held.SAMPLES, Held.SEQUENCE))

    def norm_groups(self, topology: Topology, of: Held = Held.GRADIENTS) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks whose squared norms are added for the norm of the whole gradient.

        A shard counts with its siblings, and a replicated gradient once: each rank alone has its norm.
        """
        return self.mesh(topology).groups(*self._splitting(of))

    def loss_ranks(self, topology: Topology) -> tuple[int, ...]:
        """Return one rank for each set of samples of which a loss is taken: the first of those that see the same."""
        return tuple(group[0] for group in self.replicas(topology))

    def holders(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that hold one model together, each with samples of its own or not."""
        return self.mesh(topology).groups(*self._splitting(Held.PARAMETERS, Held.EXPERTS))

    def replicas(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that see the same samples, and hold one model together."""
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
        # No backend named, several gpus: the trainer chooses, and promises what dp promises.
        replace(_DP, name="auto", opt_in=True, chosen_by_trainer=True),
        _DP,
        Backend("ddp", (Dimension("replicate", devices),), "DDP"),
        Backend("ddp2", (Dimension("replicate", nodes), _REPLICAS), "DDP2"),
        # What ddp promises; ranks shard weights, gradients and the optimizer's state, that state alone, or
        # that state and the gradients.
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
        # Shards within a group of devices, replicas over the groups.
        Backend(
            "hsdp",
            (Dimension("replicate", outermost), Dimension("shard", innermost, MODEL | {Held.SAMPLES})),
            "HSDP",
            opt_in=True,
        ),
        # Ranks hold a part of each layer, and all of them see the same samples.
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
        # Shards within a group of groups that hold a part of each layer, replicas over these.
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
        # Ranks have the whole model, and a part of each sample's sequence.
        Backend("sp", (Dimension("sp", devices, frozenset({Held.SEQUENCE})),), "SP", opt_in=True),
        # What sp promises, by an exchange of keys and values in the ranks' attention. Each rank has an early and a late
        # piece of a sequence: early queries see few keys, and late ones many.
        Backend("cp", (Dimension("cp", devices, frozenset({Held.SEQUENCE})),), "CP", opt_in=True, sequence_pieces=2),
        # Ranks have their own experts, and everything else as in ddp.
        Backend("ep", (Dimension("ep", devices, frozenset({Held.SAMPLES, Held.EXPERTS})),), "EP", opt_in=True),
        # Each rank holds some of the layers, and all of them see the same samples.
        Backend("pp", (Dimension("stage", devices, MODEL),), "PP", opt_in=True, micro_batches=4),
        # What pp promises, and replicas of it; the trainer decides who holds which layers.
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
    """Return all backends, the one that says most about a trainer first.

    A process for each device comes before replicas in one process, these before the trainer's own choice, and one
    device comes last.
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
    """Return another mesh: fewer gpus on each node, as near as there is, or one node fewer.

    Where the backend makes no sense on less, it is more gpus. A mesh of several dimensions has other sizes along the
    two inner ones, so that what is divided along them is divided otherwise: they are exchanged, or where they are
    equal the inner one is larger.
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
    """What says of a trainer that it has some backends."""

    @property
    def name(self) -> str:
        """What reports call the trainer."""

    @property
    def backends(self) -> Sequence[str]:
        """The names of the backends that are declared here."""


D = TypeVar("D", bound=Declared)


def declared_for(name: str, backend: str, declared: Sequence[D]) -> D:
    """Return what the trainer called ``name`` declared for a backend; where that is nothing, its first declaration."""
    own = [one for one in declared if one.name == name]
    return next((one for one in own if backend in one.backends), own[0])
