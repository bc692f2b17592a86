"""A rank's assignment: which cell, which rank of it, and where its evidence goes. It is sent as one JSON object."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from plumbline.core.cell import Cell
from plumbline.evidence.tensor_store import FOLDER, TensorStore
from plumbline.evidence.trace import STORE_ABOVE


def stack_beside(log: str) -> str:
    """Return the file, beside a rank's log, for the Python stacks of its threads."""
    return log.removesuffix(".log") + ".stack"


@dataclass(frozen=True)
class Assignment:
    """One rank's part in one launch.

    ``devices`` are this rank's, by torch's names. ``environment`` holds the variables that a launcher sets
    (torchrun's). ``evidence`` and ``log`` are file paths. ``checkpoint_dir`` is a folder that all ranks see, None where
    nothing is saved: there the launch stops after ``stop_after_step`` steps, or, with ``resume``, goes on. Tensors
    with more than ``store_above`` entries go into the launch's tensor store. With a ``gate``, the path of a socket, the
    launch is timed instead of recorded; with ``profile``, the path of a folder, it is profiled and leaves its files
    there. ``whole_node``: no other process is started on this rank's node; the subject
    starts the node's ranks, and ``devices`` are those of all of them.
    """

    launch: int
    cell: Cell
    rank: int
    comm: str
    devices: tuple[str, ...]
    environment: dict[str, str]
    evidence: str
    log: str
    checkpoint_dir: str | None = None
    stop_after_step: int | None = None
    resume: bool = False
    store_above: int = STORE_ABOVE
    gate: str | None = None
    profile: str | None = None
    whole_node: bool = False

    @property
    def processes_per_node(self) -> int:
        """Ranks on each node."""
        return self.cell.contract.processes_per_node(self.cell.topology)

    @property
    def node_rank(self) -> int:
        """The node this rank lives on."""
        return self.rank // self.processes_per_node

    @property
    def local_rank(self) -> int:
        """The rank's place on its node."""
        return self.rank % self.processes_per_node

    def tensor_store(self) -> TensorStore:
        """The launch's tensor store, as this process writes to it."""
        return TensorStore(os.path.join(os.path.dirname(self.evidence), FOLDER), self.store_above)

    @property
    def returned(self) -> str:
        """The file in which a whole node's first process, where it is no rank, says how the subject's call ended."""
        return os.path.join(os.path.dirname(self.evidence), f"node-{self.node_rank}.safetensors")

    def as_rank(self, rank: int) -> Assignment:
        """Return another rank's part in the launch, that of one of the same node; what it leaves lies beside."""
        place = rank % self.processes_per_node
        alone = self.whole_node and not self.cell.contract.gathers
        return replace(
            self,
            rank=rank,
            devices=self.devices[place : place + 1] if alone else self.devices,
            evidence=os.path.join(os.path.dirname(self.evidence), f"rank-{rank}.safetensors"),
            log=os.path.join(os.path.dirname(self.log), f"rank-{rank}.log"),
            whole_node=False,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Assignment:
        """Undo :meth:`to_json`."""
        return cls(**{**values, "cell": Cell.from_json(values["cell"]), "devices": tuple(values["devices"])})
