"""The cell: the unit of planning, launching, judging and reporting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from plumbline.core.backend import BACKENDS, Backend, resized
from plumbline.core.precision import PRECISIONS, Precision
from plumbline.core.topology import Topology


@dataclass(frozen=True, order=True)
class Cell:
    """One subject, workload, backend, topology and precision. Its ``id`` is unique in a run and can name a file.

    ``seed`` replaces the workload's own and is the same for a whole run. ``workload_locator`` says where the user's own
    workload is, None for a built-in one.
    """

    subject: str
    workload: str
    backend: str
    topology: Topology
    precision: str
    accelerator: str
    seed: int | None = None
    workload_locator: str | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cell:
        """Undo ``dataclasses.asdict`` after a round trip through JSON."""
        topology = values["topology"]
        return cls(**{**values, "topology": Topology(**{**topology, "mesh": tuple(topology["mesh"])})})

    @property
    def id(self) -> str:
        """The cell's name, for example ``reference-mlp-ddp-2x4-32``."""
        return f"{self.subject}-{self.workload}-{self.backend}-{self.topology}-{self.precision}"

    @property
    def parallelism(self) -> Backend:
        """The registered backend, which knows how devices share the work; the judge holds trainers to its promises."""
        return BACKENDS[self.backend]

    @property
    def arithmetic(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def resized(self) -> Cell:
        """The cell on another mesh, on which an elastic training runs until it is interrupted."""
        return replace(self, topology=resized(self.topology, self.parallelism))

    @property
    def processes(self) -> int:
        """The world size."""
        return self.parallelism.processes(self.topology)
