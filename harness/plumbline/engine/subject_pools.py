"""The warm pools of a session, one per ``--subject`` and more for measuring, or the pool of a single subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import torch

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, WorkloadError
from plumbline.launch.launchers import check_devices_of_nodes, check_nodes
from plumbline.launch.pool import Launcher, Pool
from plumbline.machine.hardware import memory_left
from plumbline.own_workloads.load import OwnWorkload, content_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Planned
from plumbline.subjects.load import parse_subject
from plumbline.workloads import find


class SubjectPools:
    """The pools, and the declarations of their subjects.

    Args:
        launcher: starts the pools.
        interpreters: the arguments of ``launcher.pool``, by the subject's locator.
        own: the user's own workloads.

    Raises:
        PlumblineError: a subject cannot be loaded, or a workload differs between this process and a subject's.
    """

    def __init__(
        self, launcher: Launcher, interpreters: Mapping[str, tuple[str, str | None]], own: Sequence[OwnWorkload] = ()
    ) -> None:
        self._launcher = launcher
        self.for_measuring = WarmPools(self._start)
        self._pools = {locator: launcher.pool(*where) for locator, where in interpreters.items()}
        try:
            self.declarations = [
                Declaration.of(locator, values) for locator, pool in self._pools.items() for values in pool.subjects
            ]
            self._import_workloads(own)
        except BaseException:
            self.close()
            raise
        self._locators = {declared.name: declared.locator for declared in self.declarations}

    def _import_workloads(self, own: Sequence[OwnWorkload]) -> None:
        workloads = [find(one.name) for one in own]
        here = {workload.name: content_of(workload) for workload in workloads}
        for pool in self._pools.values() if own else ():
            found = pool.import_workloads([str(workload.locator) for workload in workloads])
            for place, contents in found.items():
                for name in here:
                    if contents.get(name) != here[name]:
                        raise WorkloadError(
                            f"--workload {name}: its weights or data in {place} differ from those in this process. "
                            "They must not depend on the order of a set, the time, local files or the version of torch"
                        )

    def check(self, planned: list[Planned], *, oversubscribe: bool) -> None:
        """Check that there are enough nodes and devices for a plan.

        It raises ``PlanError`` if there are not.
        """
        cells: list[Cell] = [one.cell for one in planned if not one.refusal]
        check_nodes(max((cell.topology.num_nodes for cell in cells), default=1), self._launcher)
        check_devices_of_nodes(cells, self._pools.values(), oversubscribe=oversubscribe)

    def locator_of(self, subject: str) -> str:
        return self._locators[subject]

    def pool_of(self, subject: str) -> Pool:
        """Return the pool for a subject's examined cells. If its server has died, start a new one."""
        locator = self._locators[subject]
        if not self._pools[locator].alive:
            # The cell that was running reports the reason.
            self._pools[locator].close()
            self._pools[locator] = self._start(locator)
        return self._pools[locator]

    def close(self) -> None:
        self.for_measuring.close()
        for pool in self._pools.values():
            pool.close()

    def _start(self, locator: str) -> Pool:
        return self._launcher.pool(*parse_subject(locator))


@contextmanager
def open_subject(subject: str) -> Iterator[tuple[Pool, list[Declaration]]]:
    """Yield the pool of a subject and its declarations. The pool is closed afterwards.

    It raises ``SubjectError`` if there is no such subject.
    """
    torch.set_num_threads(1)  # as in the pytest plugin
    locator, python = parse_subject(subject)
    with closing(Pool(locator, python)) as pool:
        yield pool, [Declaration.of(locator, values) for values in pool.subjects]


GIB = 1 << 30
SERVER = 0.4 * GIB  # memory of a server with torch and a large library in it, in bytes: 220 to 350 MB were measured
SPARE = GIB  # memory to leave for ranks and other processes, in bytes


class WarmPools:
    """Fork servers for measurements, by locator: one for each launch of a cell, kept for all cells of a run.

    ``make`` starts one. If memory is short, the least recently used are ended.

    Ranks that are forked from one server share its memory layout and its hash seed. These shift figures by a few per
    cent, in the same way in all launches of a server, and for one trainer more than for another (Mytkowicz, Diwan,
    Hauswirth and Sweeney, ASPLOS 2009; measured here: 2 % between servers, 1 % between launches of one). Only launches
    from different servers sample that variation.
    """

    def __init__(self, make: Callable[[str], Pool], left: Callable[[], float | None] = memory_left) -> None:
        self._make = make
        self._left = left
        self._pools: dict[str, list[Pool]] = {}  # the most recently used last

    def several(self, *locators: str, count: int) -> list[list[Pool]]:
        """Return ``count`` pools of each of ``locators``, alive and idle: their warm-up is done.

        Raise ``SubjectError`` if a subject cannot be imported, ``LaunchError`` if memory is short or a server died.
        """
        found = [self._alive(locator) for locator in locators]
        self._make_room(sum(max(0, count - len(pools)) for pools in found), locators)
        for locator, pools in zip(locators, found, strict=True):
            pools += [self._make(locator) for _ in range(count - len(pools))]
        for pools in found:
            for pool in pools:
                pool.wait_until_idle()
        return [pools[:count] for pools in found]

    def _alive(self, locator: str) -> list[Pool]:
        pools = self._pools[locator] = self._pools.pop(locator, [])
        for dead in [pool for pool in pools if not pool.alive]:
            dead.close()
            pools.remove(dead)
        return pools

    def _make_room(self, more: int, wanted: tuple[str, ...]) -> None:
        others = [locator for locator in self._pools if locator not in wanted]
        while more and (left := self._left()) is not None and left < more * SERVER + SPARE:
            if not others:
                raise LaunchError(
                    f"not enough memory for {more} more interpreter{'s' * (more > 1)} (each launch needs one for "
                    f"the trainer and one for the hand-written loop): {left / GIB:.1f} GiB are free, "
                    f"{(more * SERVER + SPARE) / GIB:.1f} GiB are needed. Use fewer --launches, or end other processes"
                )
            for pool in self._pools.pop(others.pop(0)):
                pool.close()

    def close(self) -> None:
        for pools in self._pools.values():
            for pool in pools:
                pool.close()
        self._pools.clear()
