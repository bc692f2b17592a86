"""A forked rank as its fork server knows it: its log, its number of steps, and its folder for temporary files."""

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
    """A rank of a launch. ``done`` is memory that it shares with the server: the number of steps it has done.

    ``kills`` is how often the kernel had killed for want of memory when it was forked. ``scratch`` is the folder for
    temporary files where the subject starts the ranks of the node below this one, None where it does not.
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
        """Make what a rank needs before it is forked, from the JSON of its assignment."""
        Path(assignment["evidence"]).unlink(missing_ok=True)  # only this rank's evidence may be found there
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
        """Whether its evidence is there. It is another process's where the subject starts the ranks."""
        return self.scratch is None and os.path.exists(self.evidence)

    def remove_scratch(self) -> None:
        """Remove the folder for temporary files, when the processes that could write to it have ended."""
        if self.scratch:
            self.scratch.leave(remove=True)
