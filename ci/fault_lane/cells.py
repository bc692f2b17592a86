"""Faults of ranks: a faulty cell trains on a warm pool, and then a right one on the same pool."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fault_lane.fault import Fault, ImpossibleHereError, Shot
from fault_lane.memory import GROUP
from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome, worst
from plumbline.core.topology import Topology
from plumbline.evidence.trace import Trace
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launch_progress import EXIT_GRACE_S
from plumbline.launch.pool import Pool
from plumbline.workloads import find

SUBJECTS = Path(__file__).parent / "subjects"
RIGHT = SUBJECTS / "right.py"
LIMIT = 60.0
HANGING = 3.0
"""Time limits in seconds: for cells that end by themselves, and for those that hang."""

LARGEST_LOG = 4 << 20
"""The limit for a log in bytes, whatever was printed."""


@dataclass(frozen=True)
class Ended:
    """A cell that was trained and judged."""

    trace: Trace
    findings: tuple[Finding, ...]
    folder: Path

    @property
    def outcome(self) -> Outcome:
        """The cell's outcome."""
        return worst(finding.outcome for finding in self.findings)

    @property
    def message(self) -> str:
        """The message of the worst finding."""
        return next(finding.message for finding in self.findings if finding.outcome is self.outcome)


def train(
    pool: Pool, subject: str, folder: Path, topology: str = "1x2", limit: float = LIMIT, backend: str = "ddp"
) -> Ended:
    """Train and judge a cell of the smallest workload; on one device, without a backend."""
    nodes, gpus = map(int, topology.split("x"))
    backend = "none" if topology == "1x1" else backend
    cell = Cell(subject, "mlp", backend, Topology(nodes, gpus), "32", "cpu")
    trace = launch(pool, cell, folder, Settings(limit))
    return Ended(trace, judge(TraceAnalysis(trace, find("mlp", None), cell)), folder)


Question = Callable[[Ended], str | None]
"""A further check of an ended cell: returns what is wrong, or None."""


@dataclass(frozen=True)
class Must:
    """The expected outcome, message (regular expressions), rank and step."""

    outcome: Outcome
    words: tuple[str, ...] = ()
    rank: int | None = None
    step: int | None = None
    also: tuple[Question, ...] = ()

    def wrong(self, ended: Ended) -> str | None:
        """Return what is missing, or None."""
        finding = next(finding for finding in ended.findings if finding.outcome is ended.outcome)
        if ended.outcome is not self.outcome:
            return f"{ended.outcome.value}, not {self.outcome.value}: {finding.message[-300:]}"
        for word in self.words:
            if not re.search(word, finding.message, re.DOTALL):
                return f"no word of {word!r} in: {finding.message[:1500]!r}"
        if self.rank is not None and finding.rank != self.rank:
            return f"rank {finding.rank} is named, not {self.rank}"
        if self.step is not None and finding.step != self.step:
            return f"step {finding.step} is named, not {self.step}"
        return next(filter(None, (question(ended) for question in self.also)), None)

    def __str__(self) -> str:
        said = [self.outcome.value]
        said += [f"rank {self.rank}"] if self.rank is not None else []
        said += [f"step {self.step}"] if self.step is not None else []
        said += [f"«{re.sub(chr(92) * 2 + '(.)', chr(92) + '1', word)}»" for word in self.words]
        return ", ".join(said)


def cell_fault(
    row: int,
    file: str,
    subject: str,
    must: Must,
    *,
    topology: str = "1x2",
    limit: float = LIMIT,
    backend: str = "ddp",
    quick: bool = False,
) -> Fault:
    """Return a fault that is a subject in one of the files here."""

    def inject(bench: Any, folder: Path) -> Shot:
        if subject == "fills-the-memory" and not os.environ[GROUP]:
            raise ImpossibleHereError("cannot create a memory control group here")
        pool = bench.pool(SUBJECTS / file)
        ended = train(pool, subject, folder / "fault", topology, limit, backend)
        wrong = must.wrong(ended) or _too_large(ended) or _too_late(ended, limit)
        # The next cell on the same pool must be unaffected: its weights must be bitwise equal to those of a fresh pool.
        after = train(bench.pool(SUBJECTS / file), "trains", folder / "after", "1x2")
        if wrong is None and after.outcome is not Outcome.PASSED:
            wrong = f"the next cell is {after.outcome.value}: {after.message[-300:]}"
        if wrong is None and not _same(after.trace, bench.untouched):
            wrong = "the next cell's weights differ from those on a fresh pool"
        return Shot(wrong is None, wrong or ended.message)

    return Fault(f"{subject} {topology}" if topology != "1x2" else subject, row, str(must), inject, quick, file)


def _too_large(ended: Ended) -> str | None:
    large = [file.name for file in ended.folder.glob("*.log") if file.stat().st_size > LARGEST_LOG]
    return f"larger than {LARGEST_LOG >> 20} MiB: {', '.join(large)}" if large else None


def _too_late(ended: Ended, limit: float) -> str | None:
    late = ended.trace.seconds is not None and ended.trace.seconds > limit + EXIT_GRACE_S + 5
    return f"took {ended.trace.seconds:.0f} s, the limit is {limit:.0f} s" if late else None


def _same(one: Trace, other: Trace) -> bool:
    return len(one.ranks) == len(other.ranks) and all(
        a.final is not None
        and b.final is not None
        and all(torch.equal(a.final[name], b.final[name]) for name in b.final)
        for a, b in zip(one.ranks, other.ranks, strict=True)
    )


def said_of_every_rank(*words: str) -> Question:
    """Check that the message contains each pattern once for each of two ranks."""

    def question(ended: Ended) -> str | None:
        missing = [word for word in words if len(re.findall(word, ended.message)) < 1]
        return f"not said: {missing} in {ended.message[:1500]!r}" if missing else None

    return question


def log_ends_with(words: str, rank: int = 1) -> Question:
    """Check that a rank's log has kept its end."""

    def question(ended: Ended) -> str | None:
        tail = (ended.folder / f"rank-{rank}.log").read_bytes()[-4000:].decode(errors="replace")
        return None if words in tail else f"the log's end has no {words!r}: {tail[-300:]!r}"

    return question
