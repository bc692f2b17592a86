"""The assignment of a rank: its cell, its place, and its files. It is sent as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from plumbline.core.cell import Cell
from plumbline.evidence.tensor_store import FOLDER, TensorStore
from plumbline.evidence.trace import STORE_ABOVE


def stack_beside(log: str) -> str:
    """Return the file for the Python stacks of a rank, beside its log."""
    return log.removesuffix(".log") + ".stack"


@dataclass(frozen=True)
class Assignment:
    """One rank's part in one launch.

    ``devices`` are the rank's devices, by torch's names. ``environment`` has the launcher's (torchrun's) variables.
    ``evidence`` and ``log`` are file paths. ``checkpoint_dir`` is a folder that all ranks see, None if nothing is
    saved: the launch stops after ``stop_after_step`` steps and saves there or, with ``resume``, resumes from there.
    Tensors with more than ``store_above`` entries go into the launch's tensor store. With a ``barrier_socket``, the
    path of a socket, the launch is timed instead of recorded. With ``profile``, the path of a folder, it is profiled.
    ``whole_node``: the subject starts the other ranks of the node itself, and ``devices`` has the devices of all of
    them.
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
    barrier_socket: str | None = None
    profile: str | None = None
    whole_node: bool = False

    @property
    def ids(self) -> dict[str, int]:
        """The numbers by which events name this rank of this launch."""
        return {"launch": self.launch, "rank": self.rank}

    @property
    def processes_per_node(self) -> int:
        return self.cell.parallelism.processes_per_node(self.cell.topology)

    @property
    def node_rank(self) -> int:
        return self.rank // self.processes_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.processes_per_node

    def tensor_store(self) -> TensorStore:
        return TensorStore(os.path.join(os.path.dirname(self.evidence), FOLDER), self.store_above)

    @property
    def returned(self) -> str:
        """The file in which the first process of a whole node, if it is not a rank, writes how the call ended."""
        return os.path.join(os.path.dirname(self.evidence), f"node-{self.node_rank}.safetensors")

    def as_rank(self, rank: int) -> Assignment:
        place = rank % self.processes_per_node
        alone = self.whole_node and not self.cell.parallelism.gathers
        return replace(
            self,
            rank=rank,
            devices=self.devices[place : place + 1] if alone else self.devices,
            evidence=os.path.join(os.path.dirname(self.evidence), f"rank-{rank}.safetensors"),
            log=os.path.join(os.path.dirname(self.log), f"rank-{rank}.log"),
            whole_node=False,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Assignment:
        return cls(**{**values, "cell": Cell.from_json(values["cell"]), "devices": tuple(values["devices"])})
