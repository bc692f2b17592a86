"""The user's own workloads in a plan: how they combine with built-in ones, and whether they fit the matrix."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.core.errors import PlanError, WorkloadError
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import OwnWorkload
from plumbline.planning.plan import Matrix
from plumbline.planning.topologies import topologies
from plumbline.workloads import find


def selected_workloads(own: Sequence[OwnWorkload], named: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of the workloads to train: the user's own, and the built-in ones that are ``named``.

    Raises:
        PlanError: ``named`` contains one of the user's own.
    """
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
    """Check that trainers can be judged on these workloads with the devices of ``matrix``.

    Raises:
        WorkloadError: they cannot.
    """
    if not own:
        return
    devices = sorted({1, *(topology.devices for topology in topologies(matrix.gpus, matrix.nodes))})
    for one in own:
        try:
            refuse_unfit(find(one.name, matrix.seed), devices)
        except WorkloadError as error:
            raise WorkloadError(f"--workload {one.locator}: {one.name}: {error}") from error
