"""What every launcher is: the options it reads, and the pools it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from plumbline.launch.pool import Pool


@dataclass(frozen=True)
class LauncherOptions:
    """The options from which a launcher is made.

    ``nodes`` is the largest number of nodes of any cell, ``gpus`` that of devices of a node, of which ``cuda_devices``
    are CUDA devices and not simulated; both are 0 where no cell will be launched. ``subjects`` is the number of pools.
    ``rendezvous``, ``node_command`` and ``listen`` are the command line's options of these names. ``notify`` shows the
    user a message at once.
    """

    nodes: int = 1
    gpus: int = 1
    cuda_devices: int = 0
    subjects: int = 1
    rendezvous: str | None = None
    node_command: str | None = None
    listen: str | None = None
    notify: Callable[[str], None] = print


class Launcher(ABC):
    """Makes the pools of a session; one that cannot work here raises ``PlanError`` when it is made.

    ``nodes``: how many there are, None where there are as many as a cell wants. Where there is a number, evidence lies
    in a folder that all of them see. ``machines``: how many of the nodes have devices of their own. ``own_options``:
    the optional fields of ``LauncherOptions`` that this launcher reads.
    """

    own_options: ClassVar[frozenset[str]] = frozenset()
    nodes: int | None = None
    machines: int = 1

    def __init__(self, options: LauncherOptions) -> None:
        self._notify = options.notify

    @abstractmethod
    def pool(self, locator: str, python: str | None) -> Pool:
        """Start to warm up a pool for the subjects behind ``locator``, in the interpreter ``python`` or this one."""
