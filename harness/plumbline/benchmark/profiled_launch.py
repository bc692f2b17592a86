"""One launch of a cell that is profiled, apart from those that are timed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from plumbline.benchmark.timed_launch import TimedLaunch, TimedLaunchError
from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.launch.pool import Pool
from plumbline.launch.settings import Settings
from plumbline.results.records import Profile
from plumbline.results.run import PROFILES


def profiled(pool: Pool, cell: Cell, new_folder: Callable[[], Path], settings: Settings) -> tuple[Profile, Path]:
    """Train ``cell`` once under torch's profiler; return what is there, and the folder that the files lie in.

    The record has paths within the run's folder. A launch that fails is a problem of the profile alone; what it
    wrote before is kept.
    """
    folder, problems = new_folder(), []
    try:
        with closing(TimedLaunch.begin(pool, cell, new_folder(), settings, profile=folder)) as launch:
            launch.round()
            problems = [problem for rank in launch.end().ranks for problem in rank.problems]
    except TimedLaunchError as failed:
        shutil.rmtree(failed.folder, ignore_errors=True)
        problems = [_failed(failed.finding.message)]
    except LaunchError as error:
        problems = [_failed(str(error))]
    written = sorted(path.name for path in folder.glob("rank-*"))
    return Profile(files=tuple(f"{PROFILES}/{cell.id}/{name}" for name in written), problems=tuple(problems)), folder


def _failed(why: str) -> str:
    return f"the profiled launch failed: {why}"[:500]
