"""Workloads of the user's own in a plan: how they combine with built-in ones, and whether they fit the matrix."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.core.errors import PlanError, WorkloadError
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import OwnWorkload
from plumbline.planning.plan import Matrix
from plumbline.planning.topologies import topologies
from plumbline.workloads import find


def selected_workloads(own: Sequence[OwnWorkload], named: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of the workloads to train: those of the user's own, and built-in ones that are ``named``.

    Raises:
        PlanError: one of the user's own is selected by its name, which could mean it alone or nothing.
    """
    if not own:
        return named
    for one in own:
        if one.name in (named or ()):
            place = one.locator.partition("::")[0]
            raise PlanError(
                f"--workloads {one.name}: it adds built-in workloads to those of --workload, and this is one of these; "
                f"to train it alone, take --workload {place}::{one.name} and leave it out of --workloads"
            )
    return (*(one.name for one in own), *(named or ()))


def refuse_unfit_workloads(own: Sequence[OwnWorkload], matrix: Matrix) -> None:
    """Refuse workloads by which no trainer can be judged on the devices of ``matrix``.

    Raises:
        WorkloadError: what is wrong with one of them, and the way out.
    """
    if not own:
        return
    devices = sorted({1, *(topology.devices for topology in topologies(matrix.gpus, matrix.nodes))})
    for one in own:
        try:
            refuse_unfit(find(one.name, matrix.seed), devices)
        except WorkloadError as error:
            raise WorkloadError(f"--workload {one.locator}: {one.name}: {error}") from error
