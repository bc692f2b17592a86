"""The interface of launchers, and the one for this machine alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from plumbline.launch.pool import Pool


@dataclass(frozen=True)
class LauncherOptions:
    """The options of launchers.

    ``nodes`` is the largest number of nodes of any cell. ``gpus`` is the largest number of devices per node, and
    ``devices`` is how many physical devices these need; both are 0 if no cell will be launched. ``subjects`` is the
    number of pools. ``rendezvous``, ``node_command`` and ``listen`` are options of the command line. ``notify`` shows
    the user a message at once.
    """

    nodes: int = 1
    gpus: int = 1
    devices: int = 0
    subjects: int = 1
    rendezvous: str | None = None
    node_command: str | None = None
    listen: str | None = None
    notify: Callable[[str], None] = print


class Launcher(ABC):
    """Makes the pools of a session. The constructor raises ``PlanError`` if the launcher cannot work here.

    ``nodes`` is the number of nodes, None if there are as many as a cell needs. If it is a number, all nodes see the
    folder of the evidence. ``machines`` is the number of machines that the nodes run on, each with its own devices.
    ``own_options`` are the optional fields of ``LauncherOptions`` that this launcher reads.
    """

    own_options: ClassVar[frozenset[str]] = frozenset()
    nodes: int | None = None
    machines: int = 1

    def __init__(self, options: LauncherOptions) -> None:
        self._notify = options.notify

    @abstractmethod
    def pool(self, locator: str, python: str | None) -> Pool:
        """Start a pool for the subjects behind ``locator``, in the interpreter ``python`` or this one."""


class LocalLauncher(Launcher):
    """Simulates the nodes on this machine and divides its devices among them."""

    def pool(self, locator: str, python: str | None) -> Pool:
        return Pool(locator, python, self._notify)
