"""The cell, the unit of planning, launching, judging and reporting."""

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

    ``seed`` replaces the workload's own, and with it weights, data and order. It is the same for a whole run.
    ``workload_locator`` says where the workload is that is the user's own, None of a built-in one.
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
        """Undo ``dataclasses.asdict``, after a way through JSON."""
        topology = values["topology"]
        return cls(**{**values, "topology": Topology(**{**topology, "mesh": tuple(topology["mesh"])})})

    @property
    def id(self) -> str:
        """Name of the cell, for example ``reference-mlp-ddp-2x4-32``."""
        return f"{self.subject}-{self.workload}-{self.backend}-{self.topology}-{self.precision}"

    @property
    def contract(self) -> Backend:
        """The backend: its mesh, and what it promises."""
        return BACKENDS[self.backend]

    @property
    def arithmetic(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def resized(self) -> Cell:
        """The cell on another mesh: where an elastic training was before it was interrupted."""
        return replace(self, topology=resized(self.topology, self.contract))

    @property
    def processes(self) -> int:
        """World size: ranks over all nodes."""
        return self.contract.processes(self.topology)
