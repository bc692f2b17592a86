"""The options of a run, checked and converted for planning, and the command that repeats one cell with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlanError, WorkloadError
from plumbline.core.invocation import suite_command
from plumbline.launch.cell_launch import Settings
from plumbline.launch.launchers import find_launcher
from plumbline.launch.pool import Launcher, LauncherOptions
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import OwnWorkload, use_workloads
from plumbline.planning.devices import DEFAULT_GPUS, parse_mesh, resolve_accelerator
from plumbline.planning.expectation_files import FOLDER, ExpectationsError
from plumbline.planning.plan import Matrix, Planned, check_devices, check_ranks, plan, topologies
from plumbline.results.header_footer import WorkloadSource
from plumbline.results.run_writer import check_report_dir
from plumbline.statistics.intervals import FEWEST_LAUNCHES
from plumbline.subjects.load import parse_subject
from plumbline.workloads import PERFORMANCE, find


def selected_workloads(own: Sequence[OwnWorkload], named: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of the workloads to train: the user's own, and the built-in ones that are ``named``."""
    if not own:
        return named
    for one in own:
        if one.name in (named or ()):
            place = one.locator.partition("::")[0]
            raise PlanError(
                f"--workloads {one.name}: --workloads is for built-in workloads; to select one of your own, use "
                f"--workload {place}::{one.name}"
            )
    return (*(one.name for one in own), *(named or ()))


def refuse_unfit_workloads(own: Sequence[OwnWorkload], matrix: Matrix) -> None:
    """Check that trainers can be judged on these workloads with the devices of ``matrix``."""
    if not own:
        return
    devices = sorted({1, *(topology.devices for topology in topologies(matrix.gpus, matrix.nodes))})
    for one in own:
        try:
            refuse_unfit(find(one.name, matrix.seed), devices)
        except WorkloadError as error:
            raise WorkloadError(f"--workload {one.locator}: {one.name}: {error}") from error


class Options:
    """The options of a run. ``given`` are pytest's options; ``notify`` shows the user a message at once.

    Raises:
        PlanError: the options cannot be planned here.
        ReportDirUnusable: the report directory cannot be created.
    """

    def __init__(self, given: Mapping[str, Any], root: Path, notify: Callable[[str], None]) -> None:
        self._given = given
        self.settings = Settings(given["time_limit"], given["oversubscribe"], given["store_above"])
        self.launches: int = given["launches"]
        self.keep_traces: bool = given["keep_traces"]
        self.profile: bool = given["profile"]
        self.show_unsupported: bool = given["show_unsupported"]
        self.resume: str | None = given["resume"]
        self.report_dir = Path(given["report_dir"] or root / "reports")
        check_report_dir(self.report_dir)
        self.cells: Collection[str] | None = given["cell"]
        self.interpreters = {locator: parse_subject(locator) for locator in given["subject"] or ["reference"]}
        accelerator, present = resolve_accelerator(given["accelerator"])
        self.own_workloads = use_workloads(given["workload"] or ())
        self.matrix = Matrix(
            gpus=given["gpus"] or (present or DEFAULT_GPUS),
            nodes=given["nodes"],
            backends=_names(given["backends"]),
            precisions=_names(given["precisions"]),
            workloads=selected_workloads(self.own_workloads, _names(given["workloads"])),
            accelerator=accelerator,
            seed=given["seed"],
            shared=present if present and given["oversubscribe"] else None,
            meshes=tuple(map(parse_mesh, given["mesh"] or ())),
        )
        if given["gpus"] is not None and given["gpus"] < 1:
            raise PlanError(f"--gpus {given['gpus']}: must be 1 or more")
        if given["mesh"] and given["gpus"] is not None:
            raise PlanError("--mesh already sets the number of devices: remove --gpus")
        if given["mesh"] and given["backends"]:
            raise PlanError("--mesh already selects the backend: remove --backends")
        if given["launcher"] == "local":  # the machines of other launchers may be larger
            check_ranks(self.matrix)
        self.launcher: Launcher = find_launcher(given["launcher"], self._launcher_options(notify))
        check_devices(self.matrix, present * self.launcher.machines, oversubscribe=given["oversubscribe"])
        # Report a misspelt name before importing every subject's library.
        plan(self.matrix, [])
        refuse_unfit_workloads(self.own_workloads, self.matrix)

    def _launcher_options(self, notify: Callable[[str], None]) -> LauncherOptions:
        # xdist's workers launch cells, its controller does not.
        launches = "PYTEST_XDIST_WORKER" in os.environ or not self._given.get("numprocesses")
        gpus = max(topology.gpus for topology in self.matrix.topologies) if launches else 0
        devices = min(gpus, 1) if self.settings.oversubscribe else gpus
        return LauncherOptions(
            nodes=max(topology.num_nodes for topology in self.matrix.topologies),
            gpus=gpus,
            devices=0 if self.matrix.accelerator == "cpu" else devices,
            subjects=len(self.interpreters),
            rendezvous=self._given["rendezvous"],
            node_command=self._given["node_command"],
            listen=self._given["listen"],
            notify=notify,
        )

    @property
    def recorded(self) -> dict[str, Any]:
        """The options that determine which cells are tested and how, for the run's header."""
        names = ("gpus", "nodes", "backends", "precisions", "workloads", "subject", "accelerator", "seed", "launcher")
        further = ("mesh", "oversubscribe", "store_above", "launches", "workload")
        return {name: self._given[name] for name in (*names, *further)}

    @property
    def workload_sources(self) -> dict[str, WorkloadSource]:
        """The user's own workloads by name, for the run's header."""
        return {one.name: WorkloadSource(locator=one.locator, sha256=one.sha256) for one in self.own_workloads}

    def expectations(self, suite: Path) -> Path:
        """Return the folder of expectation files. By default, it lies next to the folder of the file ``suite``."""
        given = self._given["expectations"]
        if given and not os.path.isdir(given):
            raise ExpectationsError(f"--expectations {given}: folder not found")
        return Path(given) if given else suite.parent.parent / FOLDER


def _names(given: str | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(name.strip() for name in given.split(",") if name.strip())


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
        if self._given["backends"] and (cell.parallelism.opt_in or cell.parallelism.sampled):
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
