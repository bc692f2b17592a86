"""Trains and judges the cells of the next tests while a test waits for its own cell.

Only one cell trains at a time, because a pool runs one launch at a time. Cells that have trained are judged in
separate processes. If that is not possible, each cell is judged by its own test while the next cell trains.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from plumbline.core.errors import LaunchError, TraceError
from plumbline.engine.examine import Examined, Training, unreadable, verdict
from plumbline.engine.judge_process import JudgeProcess
from plumbline.engine.subject_pools import SubjectPools
from plumbline.launch.cell_launch import behavior_of, start
from plumbline.launch.settings import Settings
from plumbline.launch.this_machine import devices_of
from plumbline.machine.lease import Lease, shared_lease, try_shared_lease
from plumbline.planning.plan import Planned

AHEAD = 16
"""The largest number of cells that are trained and judged before their tests begin. Each can have a trace on disk."""


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
        """End all cells that are in flight."""
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
        """Wait until a cell has been trained or judged, and take the next step with it."""
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
            cell.finish(unreadable(error))
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
        """Launch the first ``waiting`` cell, unless another cell is training or the machine or devices are in use."""
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
