"""A forked rank as its fork server sees it: its log, its number of steps, and its folder for temporary files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.worker.log import Log
from plumbline.worker.processes import kills_for_memory
from plumbline.worker.scratch import NODE, Scratch


@dataclass(frozen=True)
class ForkedRank:
    """A rank of a launch. ``done`` is memory that it shares with the server: its number of completed steps.

    ``kills`` is the number of out-of-memory kills before its fork. ``scratch`` is a folder for temporary files if the
    subject starts the ranks of the node, else None.
    """

    launch: int
    rank: int
    evidence: str
    log: Log
    done: mmap.mmap
    kills: int
    scratch: Scratch | None

    @classmethod
    def prepare(cls, assignment: Mapping[str, Any]) -> ForkedRank:
        """Prepare a rank before its fork, from the JSON of its assignment."""
        Path(assignment["evidence"]).unlink(missing_ok=True)  # an earlier rank may have left it
        return cls(
            launch=assignment["launch"],
            rank=assignment["rank"],
            evidence=assignment["evidence"],
            log=Log(assignment["log"]),
            done=mmap.mmap(-1, 8),
            kills=kills_for_memory(),
            scratch=Scratch.new(NODE) if assignment["whole_node"] else None,
        )

    @property
    def place(self) -> dict[str, int]:
        return {"launch": self.launch, "rank": self.rank}

    @property
    def steps(self) -> int:
        return int.from_bytes(self.done[:], "little")

    @property
    def out_of_memory(self) -> bool:
        return kills_for_memory() > self.kills

    @property
    def has_evidence(self) -> bool:
        """Whether it has written evidence itself. A subject that starts its ranks leaves that to them."""
        return self.scratch is None and os.path.exists(self.evidence)

    def remove_scratch(self) -> None:
        """Remove the folder for temporary files; the processes that could write to it have ended."""
        if self.scratch:
            self.scratch.leave(remove=True)
