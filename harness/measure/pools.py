"""Warm fork servers to measure from: one for each launch of a cell, kept for all the cells of a run.

Ranks that are forked from one server share what was drawn when it started: where its memory lies, how its dictionaries
are ordered. That moves figures by a few per cent, the same way in each of its launches, and of two trainers in turns
one more than the other (Mytkowicz, Diwan, Hauswirth and Sweeney, ASPLOS 2009; seen here: 2 % between servers, 1 %
between launches of one). Launches that say something of all that need servers of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.launch.pool import Pool


class WarmPools:
    """Pools by locator; ``make`` starts one."""

    def __init__(self, make: Callable[[str], Pool]) -> None:
        self._make = make
        self._pools: dict[str, list[Pool]] = {}

    def several(self, locator: str, count: int) -> list[Pool]:
        """Return so many pools of ``locator``, all of them alive and at rest: whatever they had to make ready is done.

        Raises:
            SubjectError: there is no such subject, or it cannot be imported.
            LaunchError: one is gone.
        """
        found = self._pools.setdefault(locator, [])
        for dead in [pool for pool in found if not pool.alive]:
            dead.close()
            found.remove(dead)
        found += [self._make(locator) for _ in range(count - len(found))]
        for pool in found:
            pool.settle()
        return found[:count]

    def close(self) -> None:
        """End all of them."""
        for pools in self._pools.values():
            for pool in pools:
                pool.close()
        self._pools.clear()
