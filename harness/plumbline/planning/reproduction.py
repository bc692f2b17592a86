"""Builds the command that repeats one cell of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from plumbline.core.invocation import suite_command
from plumbline.launch.settings import Settings
from plumbline.own_workloads.load import OwnWorkload
from plumbline.planning.plan import Matrix, Planned
from plumbline.statistics.intervals import FEWEST_LAUNCHES
from plumbline.workloads import PERFORMANCE

DEFAULT_SUBJECT = "reference"


class Reproduction:
    """Builds the commands of a run. ``given`` are pytest's options, and ``matrix`` is the selection that they make."""

    def __init__(self, given: Mapping[str, Any], matrix: Matrix, own: Sequence[OwnWorkload] = ()) -> None:
        self._given = given
        self._matrix = matrix
        self._own = {one.name: one.locator for one in own}
        self._suite_command = cache(lambda suite: suite_command(suite=suite))  # reads files: too slow for each cell

    def command(self, planned: Planned, locator: str, suite: Path) -> str:
        """Return the command that runs only this cell. ``locator`` is what the user typed after ``--subject``."""
        cell = planned.cell
        words = ["--cell", cell.id]
        if locator != DEFAULT_SUBJECT:
            words += ["--subject", locator]
        if cell.workload in self._own:
            words += ["--workload", self._own[cell.workload]]
        for mesh in self._matrix.meshes:
            words += ["--mesh", mesh.text] if mesh.is_of(cell) else []
        if self._given["backends"] and (cell.contract.opt_in or cell.contract.sampled):
            words += ["--backends", cell.backend]
        for name in self._settings(measured=cell.workload in PERFORMANCE):
            words += self._option(name)
        return shlex.join([*self._suite_command(suite), *words])

    def _option(self, name: str) -> list[str]:
        value = self._given[name]
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            return []
        return [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]

    def _settings(self, *, measured: bool) -> Sequence[str]:
        """Return the options that change what the cell does or how it is judged."""
        defaults = {
            "accelerator": "auto",
            "launcher": "local",
            "time_limit": Settings().time_limit,
            "store_above": Settings().store_above,
        }
        names = ["gpus", "nodes", "seed", "rendezvous", "node_command", "listen", "expectations"]
        names += [name for name, value in defaults.items() if self._given[name] != value]
        if self._matrix.accelerator != "cpu":
            names.append("oversubscribe")  # there are always enough simulated devices
        if measured and self._given["launches"] != FEWEST_LAUNCHES:
            names.append("launches")
        return names
