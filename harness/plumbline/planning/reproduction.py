"""The shortest command that repeats one cell of a run: what changes nothing about the cell is left out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plumbline.core.invocation import suite_command
from plumbline.launch.settings import Settings
from plumbline.own_workloads.load import OwnWorkload
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, Planned, plan
from plumbline.statistics.intervals import FEWEST_LAUNCHES
from plumbline.workloads import PERFORMANCE, WORKLOADS

SIZE = ("gpus", "nodes")
FILTERS = ("backends", "precisions", "workloads")
DEFAULT_SUBJECT = "reference"


class Reproduction:
    """Writes the commands of a run. ``given`` are pytest's options, ``matrix`` is what they ask for.

    ``default_gpus`` is the budget of devices without ``--gpus``. ``own`` are the workloads of the user's own.
    """

    def __init__(
        self, given: Mapping[str, Any], matrix: Matrix, default_gpus: int, own: Sequence[OwnWorkload] = ()
    ) -> None:
        self._given = given
        self._matrix = matrix
        self._default_gpus = default_gpus
        self._own = {one.name: one.locator for one in own}
        self._plans: dict[tuple[str, tuple[str, ...], bool], frozenset[Planned]] = {}

    def command(self, planned: Planned, declared: Sequence[Declaration], suite: Path) -> str:
        """Return the command that runs just this cell; ``declared`` is all that its ``--subject`` declares.

        ``suite`` is the folder of the suite that the cell is in.
        """
        words = ["--cell", planned.cell.id]
        if (locator := declared[0].locator) != DEFAULT_SUBJECT:
            words += ["--subject", locator]
        if planned.cell.workload in self._own:
            words += ["--workload", self._own[planned.cell.workload]]
        for mesh in self._matrix.meshes:
            words += ["--mesh", mesh.text] if mesh.is_of(planned.cell) else []
        for name in self._selection(planned, declared):
            words += self._option(name)
        for name in self._further(measured=planned.cell.workload in PERFORMANCE):
            words += self._option(name)
        return shlex.join(suite_command(*words, suite=suite))

    def _option(self, name: str) -> list[str]:
        value = self._given[name]
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            return []
        return [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]

    def _selection(self, planned: Planned, declared: Sequence[Declaration]) -> Sequence[str]:
        """Return the fewest of the options that select cells with which this one is planned as it was."""
        # Machines of a cluster are counted by them.
        always = SIZE if self._given["launcher"] != "local" else ()
        for further in ((), SIZE, FILTERS[:1], (*SIZE, *FILTERS[:1])):
            names = tuple(dict.fromkeys((*always, *further)))
            if planned in self._planned_with(names, declared, measured=planned.cell.workload in PERFORMANCE):
                return names
        return (*SIZE, *FILTERS)

    def _planned_with(
        self, names: tuple[str, ...], declared: Sequence[Declaration], *, measured: bool
    ) -> frozenset[Planned]:
        key = (declared[0].locator, names, measured)
        if key not in self._plans:
            bare: dict[str, Any] = {"gpus": self._default_gpus, **dict.fromkeys(("nodes", *FILTERS))}
            matrix = replace(self._matrix, **{name: value for name, value in bare.items() if name not in names})
            self._plans[key] = frozenset(plan(matrix, declared, PERFORMANCE if measured else WORKLOADS))
        return self._plans[key]

    def _further(self, *, measured: bool) -> Sequence[str]:
        usual = {"accelerator": "auto", "launcher": "local", "time_limit": Settings().time_limit}
        usual["store_above"] = Settings().store_above
        always = ("seed", "rendezvous", "node_command", "listen", "expectations")
        names = [*always, *(name for name, value in usual.items() if self._given[name] != value)]
        if self._matrix.accelerator == "cuda":
            names.append("oversubscribe")  # simulated devices are always enough
        if measured and self._given["launches"] != FEWEST_LAUNCHES:
            names.append("launches")
        return names
