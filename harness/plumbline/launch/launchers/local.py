"""Every node of a cell is this machine."""

from __future__ import annotations

from plumbline.launch.launchers.base import Launcher
from plumbline.launch.pool import Pool


class LocalLauncher(Launcher):
    """Simulates the nodes on this machine; they divide its CUDA devices among them."""

    def pool(self, locator: str, python: str | None) -> Pool:
        return Pool(locator, python, self._notify)
