"""Launches whose ranks train in rounds: single, paired with the launch of a hand-written loop, or profiled."""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.timing import RankTiming
from plumbline.evidence.trace import Trace
from plumbline.judge.checks.launch import launch as check_launch
from plumbline.launch.cell_launch import CellLaunch, Settings, start
from plumbline.launch.launch_progress import EXIT_GRACE_S
from plumbline.launch.pool import Pool
from plumbline.machine.hardware import COUNTER_PERIOD_S, Counters, NoEnergyError, meter_of
from plumbline.results.records import PERFORMANCE, Profile
from plumbline.results.run import PROFILES
from plumbline.worker.timing.round_barrier import GO, REPORT

LEAST_ROUND_S: Final = 10 * COUNTER_PERIOD_S
"""The shortest round. In this time, a counter that is one period late at either end is wrong by a tenth."""


class EnergyUse:
    """Adds up whole devices' energy between ``begin_round`` and ``end_round``; ``read`` returns their counters."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._joules: Counters = {}
        self._before: Counters = {}
        self._why = ""

    def begin_round(self) -> None:
        self._before = self._counters()

    def end_round(self) -> None:
        for uuid, now in self._counters().items():
            if uuid in self._before:
                self._joules[uuid] = self._joules.get(uuid, 0.0) + now - self._before[uuid]

    def of(self, ranks: Sequence[RankTiming]) -> float | str:
        if self._why:
            return self._why
        used = {uuid for rank in ranks for uuid in rank.devices}
        if not used:
            return "this version of torch does not report the UUIDs of devices"
        if missing := sorted(used - self._joules.keys()):
            return f"{missing[0]} has no energy counter: NVML has one for Volta and newer GPUs, not for MIG instances"
        rounds = zip(*(rank.rounds for rank in ranks), strict=True)
        shortest = min((max(one.seconds for one in each) for each in rounds), default=0.0)
        if shortest < LEAST_ROUND_S:
            return (
                f"a round takes {shortest:.2g} s, but energy counters may update only every {COUNTER_PERIOD_S:g} s: "
                f"rounds of at least {LEAST_ROUND_S:g} s are needed"
            )
        return sum(self._joules[uuid] for uuid in used)

    def _counters(self) -> Counters:
        try:
            return self._read()
        except NoEnergyError as error:
            self._why = str(error)
            return {}


class TimedLaunchError(Exception):
    """A launch did not train to its end. The finding says why; its logs are in ``folder``."""

    def __init__(self, finding: Finding, folder: Path) -> None:
        super().__init__(finding.message)
        self.finding = finding
        self.folder = folder


@dataclass(frozen=True)
class LaunchTimings:
    """What one launch measured, by rank; ``energy`` is in joules, or says why it is unknown."""

    ranks: tuple[RankTiming, ...]
    seconds: float
    energy: float | str = "energy was not measured"


@dataclass(frozen=True)
class LaunchSample:
    """One launch of the cell, and the paired launch of the hand-written loop (the yardstick), if any."""

    timed: LaunchTimings
    yardstick: LaunchTimings | None = None


class TimedLaunch:
    """One launch of a cell of a performance workload. When ``begin`` returns, its ranks are warmed up and wait.

    Every method but ``close`` can raise ``TimedLaunchError`` (a rank raised, died or hung, or did not take one step for
    each batch) and ``LaunchError`` (the pool's server has died). After either, and after ``end``, the launch is over. A
    pool has one launch at a time; launches of several pools can take turns, since waiting ranks use no processor time.
    """

    def __init__(self, cell: Cell, folder: Path, control: RoundControl, launched: CellLaunch, seconds: float) -> None:
        self._cell = cell
        self.folder = folder
        self._control = control
        self._launched = launched
        self._seconds = seconds
        self._energy = EnergyUse(meter_of(cell.accelerator))
        self._is_over = False

    @classmethod
    def begin(
        cls, pool: Pool, cell: Cell, folder: Path, settings: Settings, profile: Path | None = None
    ) -> TimedLaunch:
        """Start the ranks and let them train their warm-up; ``profile`` is a folder for profiles of the first steps."""
        control = RoundControl(folder / "barrier", cell.processes)
        try:
            launched = start(pool, cell, folder, settings, barrier_socket=folder / "barrier", profile=profile)
        except BaseException:
            control.close()
            raise
        timed = cls(cell, folder, control, launched, settings.time_limit)
        timed._wait()
        return timed

    def round(self) -> None:
        """Let all ranks train the next round, and wait until the last of them is done."""
        self._energy.begin_round()
        self._control.release()
        self._wait()
        self._energy.end_round()

    def profile(self) -> None:
        """After all rounds: let the ranks train once to count tensors, and once to time collectives."""
        for _ in range(2):
            self._control.release()
            self._wait()

    def end(self) -> LaunchTimings:
        """Collect the ranks' reports, and let them train to the end."""
        try:
            reports = self._control.reports(self._seconds)
        except MissingRanksError as missing:
            raise self._failed(missing) from None
        trace = self._finish(self._seconds)
        if (wrong := check_launch(trace, self._cell)) is not None:
            raise self._error(wrong)
        shutil.rmtree(self.folder, ignore_errors=True)
        ranks = tuple(map(RankTiming.from_json, reports))
        return LaunchTimings(ranks, trace.seconds or 0.0, self._energy.of(ranks))

    def close(self) -> None:
        if self._is_over:
            return
        self._control.close()  # waiting ranks take this as the end
        with suppress(TimedLaunchError, LaunchError):
            self._finish(EXIT_GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        try:
            self._control.wait(self._seconds)
        except MissingRanksError as missing:
            raise self._failed(missing) from None

    def _failed(self, missing: MissingRanksError) -> TimedLaunchError:
        if not missing.late:
            self._control.close()  # a rank has ended: the others need not wait
        trace = self._finish(0.0 if missing.late else EXIT_GRACE_S)
        rank = min(missing.ranks)
        if missing.late and rank in trace.exits:
            # The waiting ranks were ended too. Their exits do not say what took too long.
            exit = trace.exits[rank]
            return self._error(Finding(PERFORMANCE, exit.outcome, f"rank {rank}: {exit.message}", rank=rank))
        unknown = f"rank {rank} ended between two rounds for an unknown reason"
        wrong = check_launch(trace, self._cell) or Finding(PERFORMANCE, Outcome.ERRORED, unknown, rank=rank)
        return self._error(wrong)

    def _finish(self, seconds: float) -> Trace:
        self._is_over = True
        running = replace(self._launched.running, deadline=time.monotonic() + seconds)
        try:
            return replace(self._launched, running=running).wait_for_trace()
        except TraceError as error:
            raise self._error(Finding(PERFORMANCE, Outcome.ERRORED, str(error))) from error
        finally:
            self._control.close()

    def _error(self, finding: Finding) -> TimedLaunchError:
        return TimedLaunchError(replace(finding, check=PERFORMANCE), self.folder)


class TrainsRounds(Protocol):
    """An object that trains one round at a time."""

    def round(self) -> object:
        """Train a round."""


def interleaved(launches: Sequence[TrainsRounds], rounds: int) -> None:
    """Let ``launches`` train ``rounds`` rounds in turns: A B, B A, …, so that drift of the machine affects both."""
    for number in range(rounds):
        for launch in launches if number % 2 == 0 else reversed(launches):
            launch.round()


def profiled(pool: Pool, cell: Cell, new_folder: Callable[[], Path], settings: Settings) -> tuple[Profile, Path]:
    """Train ``cell`` once under torch's profiler; return the profile's record, and the folder with its files.

    The record has paths within the run's folder. If the launch fails, this is a problem in the record, and the files
    written before are kept.
    """
    folder, problems = new_folder(), []
    try:
        with closing(TimedLaunch.begin(pool, cell, new_folder(), settings, profile=folder)) as launch:
            launch.round()
            problems = [problem for rank in launch.end().ranks for problem in rank.problems]
    except TimedLaunchError as failed:
        shutil.rmtree(failed.folder, ignore_errors=True)
        problems = [f"the profiled launch failed: {failed.finding.message}"[:500]]
    except LaunchError as error:
        problems = [f"the profiled launch failed: {error}"[:500]]
    written = sorted(path.name for path in folder.glob("rank-*"))
    return Profile(files=tuple(f"{PROFILES}/{cell.id}/{name}" for name in written), problems=tuple(problems)), folder


Begin = Callable[[int], TimedLaunch]  # begins the launch with this number, counted from 0
T = TypeVar("T")


class PairedRounds:
    """Trains ``rounds`` rounds per launch: call ``prepare`` and ``round`` for each, and ``finish_round`` at the end.

    Only ``round`` should be timed. Each round is paired with one of the yardstick, alternately before and after it, so
    that a machine that becomes slower slows both equally. ``launches`` has the finished launches. If a method raises
    (``TimedLaunchError``, ``LaunchError``), ``close`` ends what still runs.
    """

    def __init__(self, begin: Begin, yardstick: Begin | None, rounds: int) -> None:
        self.launches: list[LaunchSample] = []
        self._begin = begin
        self._begin_yardstick = yardstick
        self._rounds = rounds
        self._done = 0
        self._unfinished = False
        self._timed: TimedLaunch | None = None
        self._yardstick: TimedLaunch | None = None

    def prepare(self) -> None:
        """Do what comes before a round: begin a new launch or train the yardstick's round, if it is their turn."""
        self.finish_round()
        if self._done == 0:
            number = len(self.launches)
            self._timed = self._begin(number)
            if self._begin_yardstick is not None:
                self._yardstick = _blaming_yardstick(partial(self._begin_yardstick, number))
        if self._done % 2 == 0 and self._yardstick is not None:
            _blaming_yardstick(self._yardstick.round)

    def round(self) -> None:
        assert self._timed is not None
        self._unfinished = True
        self._timed.round()

    def finish_round(self) -> None:
        """Do what comes after a round, at most once. ``prepare`` does it for the previous round."""
        if not self._unfinished:
            return
        self._unfinished = False
        if self._done % 2 == 1 and self._yardstick is not None:
            _blaming_yardstick(self._yardstick.round)
        self._done += 1
        if self._done == self._rounds and self._timed is not None:
            self._timed.profile()
            timed = self._timed.end()
            yardstick = None if self._yardstick is None else _blaming_yardstick(self._yardstick.end)
            self.launches.append(LaunchSample(timed, yardstick))
            self._done, self._timed, self._yardstick = 0, None, None

    def close(self) -> None:
        for timed in (self._timed, self._yardstick):
            if timed is not None:
                timed.close()
        self._timed = self._yardstick = None


def _blaming_yardstick(do: Callable[[], T]) -> T:
    try:
        return do()
    except TimedLaunchError as failed:
        message = f"the baseline, a hand-written loop, failed: {failed.finding.message}"
        finding = replace(failed.finding, outcome=Outcome.ERRORED, message=message)
        raise TimedLaunchError(finding, failed.folder) from failed


class MissingRanksError(Exception):
    """The ranks ``ranks`` did not reach the barrier. ``late``: they still run, but the time limit has passed."""

    def __init__(self, ranks: set[int], *, late: bool) -> None:
        super().__init__(f"ranks {sorted(ranks)} did not reach the barrier")
        self.ranks = ranks
        self.late = late


class RoundControl:
    """The barrier of one launch's ranks, a Unix socket at ``path``; raises ``LaunchError`` if it cannot be bound."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self._ranks = set(range(ranks))
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"cannot create a socket at {path} ({error}): set TMPDIR to a shorter path on this machine"
            ) from error
        self._listener.listen(ranks)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._names: dict[socket.socket, int] = {}
        self._rests: dict[socket.socket, bytes] = {}
        self._gone: set[int] = set()

    def wait(self, seconds: float) -> None:
        """Wait for every rank; raise ``MissingRanksError`` if one closes its connection or exceeds ``seconds``."""
        for _ in self._next_lines(seconds):
            pass

    def release(self) -> None:
        self._send(GO)

    def reports(self, seconds: float) -> list[dict[str, Any]]:
        """Request the reports of all ranks, which wait at the barrier; return them in the order of the ranks."""
        self._send(REPORT)
        return [json.loads(line) for _, line in sorted(self._next_lines(seconds))]

    def close(self) -> None:
        """Close all connections. Waiting ranks take this as the end."""
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in self._rests:
            connection.close()
        self._rests = {}

    def _send(self, message: bytes) -> None:
        for connection in self._rests:
            try:
                connection.sendall(message)
            except OSError:
                continue  # closed: the next wait reports it

    def _next_lines(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        waiting = set(self._ranks)
        deadline = time.monotonic() + seconds
        while waiting:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MissingRanksError(waiting, late=True)
            for key, _ in ready:
                connection = key.fileobj
                if connection is self._listener:
                    new, _ = self._listener.accept()
                    self._rests[new] = b""
                    self._selector.register(new, selectors.EVENT_READ)
                    continue
                assert isinstance(connection, socket.socket)
                for rank, line in self._lines(connection):
                    waiting.discard(rank)
                    yield rank, line
            if waiting & self._gone:
                raise MissingRanksError(waiting & self._gone, late=False)

    def _lines(self, connection: socket.socket) -> Iterator[tuple[int, bytes]]:
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._selector.unregister(connection)
            del self._rests[connection]
            connection.close()
            self._gone.add(self._names[connection])
            return
        *whole, self._rests[connection] = (self._rests[connection] + chunk).split(b"\n")
        for line in whole:
            if connection in self._names:
                yield self._names[connection], line
            else:
                self._names[connection] = int(line)
