"""One launch of a cell that is profiled, apart from those that are timed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from harness.benchmark.timed_launch import TimedLaunch, TimedLaunchError
from harness.core.cell import Cell
from harness.core.errors import LaunchError
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.results.records import Profile
from harness.results.run import PROFILES


def profiled(pool: Pool, cell: Cell, new_folder: Callable[[], Path], settings: Settings) -> tuple[Profile, Path]:
    """Train ``cell`` once under torch's profiler; return what is there, and the folder that the files lie in.

    The paths of the record are those in the run's folder. A launch that fails is a problem of the profile alone.
    """
    folder = new_folder()
    try:
        with closing(TimedLaunch.begin(pool, cell, new_folder(), settings, profile=folder)) as launch:
            launch.round()
            ranks = launch.end().ranks
    except TimedLaunchError as failed:
        shutil.rmtree(failed.folder, ignore_errors=True)
        return Profile(problems=(f"the launch that was to be profiled failed: {failed.finding.message}"[:500],)), folder
    except LaunchError as error:
        return Profile(problems=(f"the launch that was to be profiled failed: {error}"[:500],)), folder
    return Profile(
        files=tuple(f"{PROFILES}/{cell.id}/{name}" for rank in ranks for name in rank.profiled),
        problems=tuple(problem for rank in ranks for problem in rank.problems),
    ), folder
