"""The declaration of a subject, and the cells that it therefore does not support."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plumbline.core.backend import Held
from plumbline.core.cell import Cell
from plumbline.core.software import UNKNOWN, Software
from plumbline.core.training_behavior import EVERY_OTHER, ORDINARY, TrainingBehavior, of_accelerator
from plumbline.devices.types import backend_of
from plumbline.machine.software import repository_commit
from plumbline.results.header_footer import SubjectCode
from plumbline.workloads import EVERY, PerformanceWorkload, Workload


@dataclass(frozen=True)
class Refusal:
    """Why a cell is not trained. ``undeclared`` lists what the cell needs but its subject does not declare."""

    sentence: str
    undeclared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declaration:
    """The declaration of a subject. ``locator`` is what the user typed after ``--subject``.

    ``precisions`` has the precisions by accelerator, see :func:`plumbline.core.training_behavior.of_accelerator`.
    ``launch`` says whether the harness starts a process for each ``rank`` or for each ``node``.
    ``source`` is the file and line of the subject's function, ``sha256`` the hash of that file and of the files that it
    imports from its folder; None if unknown.
    """

    name: str
    locator: str
    backends: tuple[str, ...]
    precisions: Mapping[str, Sequence[str]]
    capabilities: frozenset[str]
    software: Software = UNKNOWN
    launch: str = "rank"
    behavior: TrainingBehavior = ORDINARY
    source: tuple[str, int] | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, locator: str, values: Mapping[str, Any]) -> Declaration:
        return cls(
            name=values["name"],
            locator=locator,
            backends=tuple(values["backends"]),
            precisions=values["precisions"],
            capabilities=frozenset(values["capabilities"]),
            software=Software(**values["software"]),
            launch=values["launch"],
            behavior=TrainingBehavior.of(values["conduct"]),
            source=values["source"] and tuple(values["source"]),
            sha256=values["sha256"],
        )

    def refusal(self, cell: Cell) -> Refusal | None:
        if cell.backend not in self.backends:
            return Refusal(f"{self.name} does not declare backend {cell.backend!r}", (f"backend {cell.backend}",))
        offered = of_accelerator(self.precisions, cell.accelerator)
        if not offered:
            others = " and ".join(name for name, some in self.precisions.items() if some and name != EVERY_OTHER)
            sentence = f"{self.name} declares no precision on {cell.accelerator}"
            if others:
                sentence = f"{self.name} declares backend {cell.backend!r} only on {others}, not on {cell.accelerator}"
            return Refusal(sentence, (f"backend {cell.backend} on {cell.accelerator}",))
        if cell.precision not in offered:
            return Refusal(
                f"{self.name} does not declare precision {cell.precision!r} on {cell.accelerator}",
                (f"precision {cell.precision}",),
            )
        workload = EVERY[cell.workload]
        limits = dict(self._limits(cell))
        missing = sorted(workload.needs - self.capabilities)
        if limits or missing:
            needed = f"{cell.workload} needs {', '.join(missing)}, which {self.name} does not declare"
            return Refusal(next(iter(limits.values()), needed), (*missing, *limits))
        if self.launch == "node" and isinstance(workload, PerformanceWorkload):
            return Refusal(f"{self.name} starts its own ranks, so its speed cannot be measured")
        oldest = min(map(_release, (torch.__version__, self.software.torch or torch.__version__)))
        if oldest < workload.needs_torch:
            return Refusal(f"{cell.workload} needs torch {'.'.join(map(str, workload.needs_torch))} or later")
        communication = backend_of(cell.accelerator)
        if workload.gloo_only and communication not in ("gloo", None) and cell.processes > 1:
            return Refusal(f"{communication.upper()} cannot {workload.gloo_only}")
        # An elastic training begins on a different topology, which has to fit as well.
        unfit = (self._misfit(one, workload) for one in ((cell, cell.resized) if workload.elastic else (cell,)))
        misfit = next(filter(None, unfit), None) or _why_batches_differ(cell, workload)
        return None if misfit is None else Refusal(misfit)

    def _misfit(self, cell: Cell, workload: Workload) -> str | None:
        if cell.parallelism.divides_experts and workload.experts < cell.processes:
            return f"{cell.workload} has only {workload.experts} experts for {cell.processes} ranks"
        if uneven := _why_uneven(cell, workload, self.behavior.divides):
            return f"{uneven}; {self.name} declares divides={list(self.behavior.divides)}"
        if self.behavior.needs_equal_batches and (last := _last_batch(cell, workload)):
            return f"{self.name} declares batches='equal', but {cell.workload} has a last batch of {last} samples"
        stages = self._stages(cell)
        return _why_no_stages(cell, workload, stages) if stages else _why_no_parts(cell, workload)

    def _stages(self, cell: Cell) -> int:
        if cell.parallelism.micro_batches == 1:
            return 0
        return len(cell.parallelism.replicas(cell.topology)[0]) * self.behavior.stages_per_rank

    def _limits(self, cell: Cell) -> Iterator[tuple[str, str]]:
        nodes, most = cell.topology.num_nodes, self.behavior.max_nodes
        if most is not None and nodes > most:
            yield f"{nodes} nodes", f"{self.name} declares max_nodes={most}; this cell has {nodes} nodes"
        stages, most = self._stages(cell), self.behavior.max_stages
        if most is not None and stages > most:
            yield f"{stages} stages", f"{self.name} declares max_stages={most}; this cell has {stages} stages"
        needs_epochs = EVERY[cell.workload].needs_epochs
        if self.behavior.by_iterations and needs_epochs:
            yield "epochs", f"{self.name} declares data='iterations', but {cell.workload} {needs_epochs}"
        if self.behavior.own_loss and not EVERY[cell.workload].mean_over_labels:
            yield "another loss", f"{self.name} declares loss='labels', but {cell.workload} has another loss"
        if self.behavior.adapters_only and not EVERY[cell.workload].adapters:
            yield "no adapters", f"{self.name} declares model='adapters', but {cell.workload} has no adapters"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _features(workload: Workload) -> frozenset[int]:
    linear = [one for one in workload.model().modules() if isinstance(one, nn.Linear)]
    return frozenset(size for one in linear for size in (one.in_features, one.out_features))


_COUNTED: Mapping[str, tuple[frozenset[Held], Callable[[Workload], Collection[int]]]] = {
    "heads": (frozenset({Held.PARAMETERS, Held.SEQUENCE}), lambda workload: (workload.heads,)),
    "features": (frozenset({Held.PARAMETERS}), _features),
    "experts": (frozenset({Held.EXPERTS}), lambda workload: (workload.experts,)),
}
"""For each value of ``divides``: the kinds of mesh dimensions that divide it, and the counts to be divided evenly."""


def _why_uneven(cell: Cell, workload: Workload, divides: Collection[str]) -> str | None:
    """Return what the ranks cannot divide evenly, if anything. Shards that are gathered before use do not count."""
    if cell.parallelism.has_stages:
        return None
    for what in divides:
        held, count = _COUNTED[what]
        together = [
            one for one in cell.parallelism.dimensions if Held.SAMPLES not in one.splits or Held.EXPERTS in held
        ]
        names = [one.name for one in together if not one.splits.isdisjoint(held)]
        parts = cell.parallelism.mesh(cell.topology).part(0, *names).count
        for number in sorted(count(workload)):
            if number % parts:
                return f"{cell.workload} has {number} {what}, not divisible by {parts} ranks"
    return None


def _why_batches_differ(cell: Cell, workload: Workload) -> str | None:
    if not workload.elastic:
        return None
    now, before = cell.topology.devices, cell.resized.topology.devices
    sizes = {devices: workload.global_batch_size(devices) for devices in (now, before)}
    if sizes[now] == sizes[before]:
        return None
    return f"{cell.workload} has batches of {sizes[now]} samples on {now} devices, but {sizes[before]} on {before}"


def _why_no_parts(cell: Cell, workload: Workload) -> str | None:
    if cell.parallelism.divides_layers and workload.whole_layers is not None:
        return f"{cell.workload} has layers that cannot be divided: {workload.whole_layers}"
    parts, tokens = cell.parallelism.part(0, cell.topology, Held.SEQUENCE).count, workload.sequence
    if parts > max(tokens, 1):
        short = f"sequences of {tokens} tokens, too few for {parts} ranks" if tokens else "no sequences to divide"
        return f"{cell.workload} has {short}"
    pieces = cell.parallelism.sequence_pieces
    if pieces is not None and tokens % (parts * pieces):
        return f"{cell.workload} has sequences of {tokens} tokens, not divisible by {parts * pieces}"
    return None


def _last_batch(cell: Cell, workload: Workload) -> int:
    """Return the size of an epoch's last batch if it is smaller than the others; else 0."""
    return workload.samples(cell.topology.devices) % workload.global_batch_size(cell.topology.devices)


def _why_no_stages(cell: Cell, workload: Workload, stages: int) -> str | None:
    parts = len(cell.parallelism.replicas(cell.topology)) * cell.parallelism.micro_batches
    if workload.blocks is not None and workload.blocks < stages:
        return f"{cell.workload} has too few blocks for {stages} stages: {workload.blocks}"
    for size in (workload.global_batch_size(cell.topology.devices), _last_batch(cell, workload)):
        if size % parts:
            return f"{cell.workload} has a batch of {size} samples, not divisible into {parts} micro-batches"
    return None


_PACKAGE = Path(__file__).resolve().parents[1]


def subject_code(declarations: Iterable[Declaration]) -> dict[str, SubjectCode]:
    """Return the code of each subject by name. If several declarations have the same name, the first counts."""
    found: dict[str, SubjectCode] = {}
    for one in declarations:
        if one.name not in found:
            found[one.name] = SubjectCode(sha256=one.sha256, commit=_commit(one))
    return found


def _commit(one: Declaration) -> str | None:
    file = Path(one.source[0]).resolve() if one.source else None
    return None if file is None or file.is_relative_to(_PACKAGE) else repository_commit(file)
