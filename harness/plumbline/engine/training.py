"""A launch that a thread follows, so that this process can do something else."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing import Pipe

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.engine.examine import trace_of
from plumbline.evidence.trace import Trace
from plumbline.launch.cell_launch import CellLaunch
from plumbline.launch.pool import Pool

STOP_ATTEMPTS = 10


class Training:
    """The training of ``cell`` that ``launched`` began. ``ended`` becomes readable when its trace is there."""

    def __init__(self, launched: CellLaunch, cell: Cell) -> None:
        self._launched: CellLaunch | None = launched
        self.pool: Pool = launched.pool
        self._result: Trace | Exception | None = None
        self.ended, self._ends = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._follow, args=(launched, cell), daemon=True)
        self._thread.start()

    def trace(self) -> Trace:
        """Wait for the trace, and give it away.

        Raises:
            LaunchError, TraceError: as for ``trace_of``.
        """
        self._thread.join()
        self.ended.close()
        result, self._result, self._launched = self._result, None, None
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    def stop(self) -> None:
        """Kill the ranks."""
        for _ in range(STOP_ATTEMPTS):  # a workload with an interruption has several launches
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
