"""Resources that the faults of one examination share: warm pools, a whole run, and a working folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from fault_lane.cells import RIGHT, train
from fault_lane.deaths import Chain
from fault_lane.project import CELLS, Project
from plumbline.evidence.trace import Trace
from plumbline.launch.pool import Pool


class Bench:
    """``temporary`` is the temporary directory of all started processes; every injection has a folder beside it.

    ``chain`` is the run that is killed and resumed repeatedly.
    """

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.chain: Chain | None = None
        self._folders = 0
        self._pools: dict[Path, Pool] = {}

    @property
    def pools(self) -> int:
        """The number of pools started so far."""
        return len(self._pools)

    def folder(self) -> Path:
        """Return a new folder."""
        self._folders += 1
        path = self.temporary.parent / f"fault-{self._folders}"
        path.mkdir()
        return path

    def warm_up(self, files: Iterable[Path]) -> None:
        """Start the pools of several files at once, and wait until they are warm."""
        self._pools |= {file: Pool(str(file)) for file in set(files) - self._pools.keys()}
        assert all(pool.subjects for pool in self._pools.values())

    def pool(self, file: Path) -> Pool:
        """Return the warm pool of a file of subjects; replace a dead one, as a session does."""
        if file not in self._pools or not self._pools[file].alive:
            if dead := self._pools.pop(file, None):
                dead.close()
            self.warm_up([file])
        return self._pools[file]

    @cached_property
    def untouched(self) -> Trace:
        """The trace of a right cell on a fresh pool."""
        return train(self.pool(RIGHT), "trains", self.temporary / "untouched").trace

    @cached_property
    def _whole(self) -> tuple[Project, float]:
        project, started = Project(self.folder()), time.monotonic()
        assert project.pytest(*CELLS).code == 0
        return project, time.monotonic() - started

    @property
    def seconds_of_a_run(self) -> float:
        """The duration of a run that is not disturbed."""
        return self._whole[1]

    def whole_run(self, project: Project) -> bytes:
        """Make a whole run in a project; return its results."""
        shutil.copytree(self._whole[0].reports, project.reports, symlinks=True)
        return (project.reports / "latest" / "results.jsonl").read_bytes()

    def close(self) -> None:
        """Close all pools."""
        for pool in self._pools.values():
            pool.close()
