"""Every node of a cell is this machine."""

from __future__ import annotations

from plumbline.launch.launchers.base import Launcher
from plumbline.launch.pool import Pool


class LocalLauncher(Launcher):
    """Simulates each node on this machine, whose CUDA devices, where there are any, the nodes divide."""

    def pool(self, locator: str, python: str | None) -> Pool:
        return Pool(locator, python, self._notify)
