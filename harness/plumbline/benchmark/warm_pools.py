"""Warm fork servers for measurements: one for each launch of a cell, kept for all cells of a run.

Ranks that are forked from one server share its memory layout and its hash seed. These shift figures by a few per cent,
in the same way in all launches of a server, and for one trainer more than for another (Mytkowicz, Diwan, Hauswirth and
Sweeney, ASPLOS 2009; measured here: 2 % between servers, 1 % between launches of one). Only launches from different
servers sample that variation.
"""

from __future__ import annotations

from collections.abc import Callable

from plumbline.core.errors import LaunchError
from plumbline.launch.pool import Pool
from plumbline.machine.hardware import memory_left

GIB = 1 << 30
SERVER = 0.4 * GIB  # memory of a server with torch and a large library in it, in bytes: 220 to 350 MB were measured
SPARE = GIB  # memory to leave for ranks and other processes, in bytes


class WarmPools:
    """Pools by locator; ``make`` starts one. If memory is short, the least recently used are ended."""

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
