"""Trains and judges the cells of the next tests while a test waits for its own cell.

Only one cell trains at a time, because a pool runs one launch at a time. Cells that have trained are judged in
separate processes. If that is not possible, each cell is judged by its own test while the next cell trains.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, TraceError
from plumbline.devices.counting import available
from plumbline.engine.examine import Examined, trace_of, verdict, without_verdict
from plumbline.engine.subject_pools import SubjectPools
from plumbline.evidence.trace import Trace
from plumbline.launch.cell_launch import CellLaunch, Settings, behavior_of, start
from plumbline.launch.pool import Pool
from plumbline.launch.this_machine import devices_of
from plumbline.machine.lease import Lease, shared_lease, try_shared_lease
from plumbline.planning.plan import Planned
from plumbline.worker.processes import die_with

STOP_ATTEMPTS = 10
"""How often ``stop`` kills the ranks at most: a workload with an interruption has several launches."""

AHEAD = 16
"""The largest number of cells that are trained and judged before their tests begin. Each can have a trace on disk."""

MOST_JUDGES = 4
"""The largest number of judges. Each needs memory for a trace, and one launch at a time does not keep more busy."""

NICENESS = 5
"""The niceness of judges. Ranks have a time limit: with two nice judges, ranks get at least as much of two cores as
with one judge at the ranks' own niceness."""


def number_of_judges() -> int:
    """Return how many traces can be judged at once; 0 if this process has to judge them itself.

    Judges are forks, so that they have the causes, checks and workloads registered in this process. Forking is not
    possible when autograd has threads for devices, and not reliable on macOS.
    """
    if sys.platform != "linux" or torch.cuda.is_available() or available()[1]:
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_JUDGES) if cores > 1 else 0


class JudgeProcess:
    """A fork of this process that calls ``judge``, so that several cells are judged at once."""

    def __init__(self, judge: Callable[[], Examined]) -> None:
        self._judge = judge
        context = multiprocessing.get_context("fork")
        self.connection, send_to = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_judgement, args=(judge, send_to, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Forking is safe here: the threads of rendezvous stores hold no lock that a judge takes.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self._process.start()
        send_to.close()

    def wait(self) -> Examined:
        """Return what ``judge`` returns. If the fork failed, call ``judge`` in this process."""
        try:
            examined: Examined = self.connection.recv()
        except (EOFError, OSError):
            examined = self._judge()
        finally:
            self.end()
        return examined

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _send_judgement(judge: Callable[[], Examined], connection: Connection, parent: int) -> None:
    die_with(parent)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    gc.freeze()  # the parent's objects may own threads, which a fork does not have
    with suppress(Exception):
        connection.send(judge())


class Training:
    """The training of ``cell`` that ``launched`` began. A thread follows it.

    ``ended`` becomes readable when the training has ended.
    """

    def __init__(self, launched: CellLaunch, cell: Cell) -> None:
        self._launched: CellLaunch | None = launched
        self.pool: Pool = launched.pool
        self._result: Trace | Exception | None = None
        self.ended, self._ends = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._follow, args=(launched, cell), daemon=True)
        self._thread.start()

    def trace(self) -> Trace:
        """Wait for the trace, and return it without keeping a reference. Call this once.

        It raises what ``trace_of`` raises.
        """
        self._thread.join()
        self.ended.close()
        result, self._result, self._launched = self._result, None, None
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    def stop(self) -> None:
        for _ in range(STOP_ATTEMPTS):
            if not self._thread.is_alive():
                break
            with suppress(LaunchError):
                self.pool.kill_ranks()
            self._thread.join(0.5)
        self.ended.close()

    def _follow(self, launched: CellLaunch, cell: Cell) -> None:
        try:
            self._result = trace_of(launched, cell)
        except Exception as error:
            self._result = error
        finally:
            self._ends.close()


@dataclass(eq=False)
class CellInFlight:
    """A cell that is being trained or judged, the folder of its trace, and the lease that it holds until it is judged.

    ``end`` is the verdict on the cell, or the error that the cell's test raises.
    """

    planned: Planned
    folder: Path
    training: Training
    lease: Lease
    judging: JudgeProcess | None = None
    end: Examined | LaunchError | None = None

    def finish(self, end: Examined | LaunchError) -> None:
        self.end = end
        self.judging = None
        self.lease.give_back()

    def discard(self) -> None:
        self.training.stop()
        if self.judging is not None:
            self.judging.end()
        self.lease.give_back()
        shutil.rmtree(self.folder, ignore_errors=True)


class CellsInFlight:
    """Launches cells from ``pools`` and judges them, in the order of their tests.

    With ``leases_devices``, a launch leases the devices of its cell. Devices of other machines need no lease, because
    they belong to the job. ``judges`` is the largest number of judging processes.
    """

    def __init__(
        self,
        pools: SubjectPools,
        settings: Settings,
        new_folder: Callable[[], Path],
        notify: Callable[[str], None],
        *,
        leases_devices: bool,
        judges: int,
    ) -> None:
        self._pools = pools
        self._settings = settings
        self._new_folder = new_folder
        self._notify = notify
        self._leases_devices = leases_devices
        self._judges = judges
        self._has_judged = False
        self._cells: list[CellInFlight] = []
        self._training: CellInFlight | None = None

    def launch(self, planned: Planned) -> CellInFlight:
        """Return the cell of a test. If it is not in flight yet, launch it, which can wait for a lease.

        It raises ``LaunchError`` if the pool's server has died.
        """
        found = self._find(planned)
        while self._cells and self._cells[0] is not found:  # its test was skipped
            self._discard(self._cells[0])
        if found is not None:
            return found
        share_devices = self._settings.oversubscribe
        lease = shared_lease(self._devices_of(planned), share_devices=share_devices, notify=self._notify)
        return self._start(planned, lease)

    def wait_for_verdict(self, cell: CellInFlight, upcoming: Iterable[Planned]) -> Examined:
        """Wait for the verdict on a cell, and train and judge the ``upcoming`` cells in the meantime.

        It raises ``LaunchError`` if the harness could not launch the cell's ranks, or lost them.
        """
        waiting = [one for one in upcoming if self._find(one) is None]
        self._launch_next(waiting)
        while cell.end is None:
            self._advance(waiting)
        self._cells.remove(cell)
        if isinstance(cell.end, LaunchError):
            raise cell.end
        return cell.end

    def discard(self) -> None:
        while self._cells:
            self._discard(self._cells[0])

    def _discard(self, cell: CellInFlight) -> None:
        self._cells.remove(cell)
        if cell is self._training:
            self._training = None
        cell.discard()

    def _find(self, planned: Planned) -> CellInFlight | None:
        return next((cell for cell in self._cells if cell.planned == planned), None)

    def _advance(self, waiting: list[Planned]) -> None:
        judging = {cell.judging.connection: cell for cell in self._cells if cell.judging is not None}
        trains = self._training if len(judging) < max(1, self._judges) else None
        ready = wait([*judging, *([trains.training.ended] if trains else [])])
        for connection, cell in judging.items():
            if connection in ready and cell.judging is not None:
                cell.finish(cell.judging.wait())
        if trains is not None and trains.training.ended in ready:
            self._judge(trains, waiting)

    def _judge(self, cell: CellInFlight, waiting: list[Planned]) -> None:
        self._training = None
        try:
            trace = cell.training.trace()
        except LaunchError as error:
            cell.finish(error)
        except TraceError as error:
            cell.finish(without_verdict(error))
        cell.lease.give_back_devices()  # judging needs the CPU only
        if cell.end is not None:
            self._launch_next(waiting)
            return
        judge = partial(verdict, trace, cell.planned.cell, behavior_of(cell.training.pool, cell.planned.cell))
        if self._judges and self._has_judged:
            cell.judging = JudgeProcess(judge)  # fork now: it would keep the next launch's connections open
            self._launch_next(waiting)
        else:
            # Judge the first cell in this process, so that all judges inherit what is imported and computed once.
            self._launch_next(waiting)
            self._has_judged = True
            cell.finish(judge())

    def _launch_next(self, waiting: list[Planned]) -> None:
        if not waiting or self._training is not None:
            return
        lease = try_shared_lease(self._devices_of(waiting[0]), share_devices=self._settings.oversubscribe)
        if lease is None:
            return
        try:
            self._start(waiting.pop(0), lease)
        except LaunchError:
            waiting.clear()  # the cell's own test launches it again and reports the error

    def _start(self, planned: Planned, lease: Lease) -> CellInFlight:
        try:
            folder = self._new_folder()
            launched = start(self._pools.pool_of(planned.cell.subject), planned.cell, folder, self._settings)
        except BaseException:
            lease.give_back()
            raise
        self._training = CellInFlight(planned, folder, Training(launched, planned.cell), lease)
        self._cells.append(self._training)
        return self._training

    def _devices_of(self, planned: Planned) -> Sequence[str]:
        return devices_of(planned.cell, self._settings.oversubscribe) if self._leases_devices else ()
