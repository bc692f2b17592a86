"""A warm group of ranks that trains in rounds: begun, timed round by round, ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness.benchmark.round_control import MissingRanksError, RoundControl
from harness.core.cell import Cell
from harness.core.errors import LaunchError, TraceError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.timing import RankTiming
from harness.evidence.trace import Trace
from harness.judge.checks.launch import launch as what_is_wrong
from harness.launch.local.launcher import Launched, start
from harness.launch.pool import GRACE, Pool
from harness.launch.settings import Settings
from harness.results.records import PERFORMANCE


class TimedLaunchError(Exception):
    """A group that did not come to the end of its training: the finding says why; its logs lie in ``folder``."""

    def __init__(self, finding: Finding, folder: Path) -> None:
        super().__init__(finding.message)
        self.finding = finding
        self.folder = folder


@dataclass(frozen=True)
class LaunchTimings:
    """What one launch measured, by rank; ``seconds`` is all of it, from the start of its ranks to their end."""

    ranks: tuple[RankTiming, ...]
    seconds: float


class TimedLaunch:
    """One launch of a cell of a performance workload. Its ranks are warm, and wait, when ``begin`` returns.

    Every method but ``close`` may raise ``GroupError`` (a rank raised, died or hung, or did not make one step of each
    batch) and ``LaunchError`` (the pool's server is gone). After either, and after ``end``, the group is over. A pool
    has one group at a time; groups of several pools may take turns, since those that wait take no time from others.
    """

    def __init__(self, cell: Cell, folder: Path, gates: RoundControl, launched: Launched, seconds: float) -> None:
        self._cell = cell
        self.folder = folder
        self._gates = gates
        self._launched = launched
        self._seconds = seconds
        self._is_over = False

    @classmethod
    def begin(cls, pool: Pool, cell: Cell, folder: Path, settings: Settings) -> TimedLaunch:
        """Start the ranks and let them train their warm-up; ``folder`` is there, and the group's from now on."""
        gates = RoundControl(folder / "gate", cell.processes)
        try:
            launched = start(pool, cell, folder, settings, gate=folder / "gate")
        except BaseException:
            gates.close()
            raise
        group = cls(cell, folder, gates, launched, settings.time_limit)
        group._wait()
        return group

    def round(self) -> None:
        """Let all ranks train the next round, and wait until the last of them is done."""
        self._gates.release()
        self._wait()

    def look(self) -> None:
        """Let tensors be counted and collectives be looked at, when all rounds are done."""
        for _ in range(2):
            self.round()

    def end(self) -> LaunchTimings:
        """Take the ranks' reports, and let them train to the end."""
        try:
            reports = self._gates.reports(self._seconds)
        except MissingRanksError as missing:
            raise self._failed(missing) from None
        trace = self._ended(self._seconds)
        wrong = what_is_wrong(trace, self._cell)
        if wrong is not None:
            raise self._told(wrong)
        shutil.rmtree(self.folder, ignore_errors=True)
        return LaunchTimings(tuple(map(RankTiming.from_json, reports)), trace.seconds or 0.0)

    def close(self) -> None:
        """End a group that nobody wants any more; of one that is over nothing is left to end."""
        if self._is_over:
            return
        self._gates.close()  # those that wait there take it as the end
        with suppress(TimedLaunchError, LaunchError):
            self._ended(GRACE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        try:
            self._gates.wait(self._seconds)
        except MissingRanksError as missing:
            raise self._failed(missing) from None

    def _failed(self, missing: MissingRanksError) -> TimedLaunchError:
        """Return what became of a group of which ranks are missing at a boundary."""
        if not missing.late:
            self._gates.close()  # somebody is gone: nobody need wait any longer
        trace = self._ended(0.0 if missing.late else GRACE)
        rank = min(missing.ranks)
        if missing.late and rank in trace.exits:
            # Those that waited for it were ended with it, and say nothing of what took too long.
            exit = trace.exits[rank]
            return self._told(Finding(PERFORMANCE, exit.outcome, f"rank {rank}: {exit.message}", rank=rank))
        wrong = what_is_wrong(trace, self._cell)
        nobody_knows = Finding(
            PERFORMANCE, Outcome.ERRORED, f"rank {rank} left in the middle, and nothing says why", rank=rank
        )
        return self._told(wrong or nobody_knows)

    def _ended(self, seconds: float) -> Trace:
        """Wait for the end of the ranks, which are made to end after so many seconds, and return their evidence."""
        self._is_over = True
        running = replace(self._launched.running, deadline=time.monotonic() + seconds)
        try:
            return replace(self._launched, running=running).trace()
        except TraceError as error:
            raise self._told(Finding(PERFORMANCE, Outcome.ERRORED, str(error))) from error
        finally:
            self._gates.close()

    def _told(self, finding: Finding) -> TimedLaunchError:
        return TimedLaunchError(replace(finding, check=PERFORMANCE), self.folder)


class TakesTurns(Protocol):
    """Whatever trains a round at a time."""

    def round(self) -> object:
        """Train a round."""


def interleaved(groups: Sequence[TakesTurns], rounds: int) -> None:
    """Let ``groups``, which have begun, train ``rounds`` rounds in turns.

    Every other time in the opposite order (A B, B A, …), so that a machine which grows slower all the while is as slow
    for one as for the other.
    """
    for number in range(rounds):
        for group in groups if number % 2 == 0 else reversed(groups):
            group.round()
