"""Launches the next cell while this process judges the last one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plumbline.core.errors import LaunchError
from plumbline.launch.cell_launch import CellLaunch, start
from plumbline.launch.settings import Settings
from plumbline.launch.this_machine import devices_of
from plumbline.machine.lease import Lease, shared_lease, try_shared_lease
from plumbline.planning.plan import Planned
from plumbline.pytest_plugin.subject_pools import SubjectPools


@dataclass(frozen=True)
class LeasedLaunch:
    """A launch in progress, the folder of its trace, and the lease that it holds."""

    planned: Planned
    folder: Path
    launched: CellLaunch
    lease: Lease

    def discard(self) -> None:
        with self.lease:
            self.launched.wait_for_trace()
        shutil.rmtree(self.folder, ignore_errors=True)


class Prefetch:
    """Launches cells from ``pools``, at most one ahead of the cell that is being judged.

    With ``leases_devices``, a launch leases the CUDA devices of its cell. Devices of other machines need no lease: they
    belong to the job.
    """

    def __init__(
        self,
        pools: SubjectPools,
        settings: Settings,
        new_folder: Callable[[], Path],
        notify: Callable[[str], None],
        *,
        leases_devices: bool,
    ) -> None:
        self._pools = pools
        self._settings = settings
        self._new_folder = new_folder
        self._notify = notify
        self._leases_devices = leases_devices
        self._begun: LeasedLaunch | None = None

    def launch(self, planned: Planned) -> LeasedLaunch:
        """Return the prefetched launch of a cell, or a new one. A new one may have to wait for its lease.

        Raises:
            LaunchError: the pool's server has died.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun.planned == planned:
            return begun
        if begun is not None:
            begun.discard()
        share_devices = self._settings.oversubscribe
        return self._start(
            planned, shared_lease(self._devices_of(planned), share_devices=share_devices, notify=self._notify)
        )

    def begin(self, planned: Planned) -> None:
        """Launch the cell of the next test, unless the machine or its devices are in use."""
        lease = try_shared_lease(self._devices_of(planned), share_devices=self._settings.oversubscribe)
        if lease is None:
            return
        try:
            self._begun = self._start(planned, lease)
        except LaunchError:
            self._begun = None  # the cell's own test launches it again and reports the error

    def discard(self) -> None:
        if self._begun is not None:
            self._begun.discard()
            self._begun = None

    def close(self) -> None:
        if self._begun is not None:
            shutil.rmtree(self._begun.folder, ignore_errors=True)
            self._begun.lease.give_back()
            self._begun = None

    def _start(self, planned: Planned, lease: Lease) -> LeasedLaunch:
        try:
            folder = self._new_folder()
            launched = start(self._pools.pool_of(planned.cell.subject), planned.cell, folder, self._settings)
        except BaseException:
            lease.give_back()
            raise
        return LeasedLaunch(planned, folder, launched, lease)

    def _devices_of(self, planned: Planned) -> tuple[str, ...]:
        return devices_of(planned.cell, self._settings.oversubscribe) if self._leases_devices else ()
