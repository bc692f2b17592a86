"""The user's own workloads of a recorded run: are they there, and are they unchanged?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from plumbline.own_workloads.load import OwnWorkload, use_workloads
from plumbline.results.header_footer import WorkloadSource


def use_recorded_workloads(recorded: Mapping[str, WorkloadSource], given: Sequence[str] = ()) -> dict[str, str]:
    """Load the workloads of a run from the places that the user gives.

    The places in the record are not used: the run may come from anywhere, and workloads are programs.

    Returns:
        Why a workload cannot be used, by its name: it was not given, is missing, or has changed.

    Raises:
        WorkloadError: one of ``given`` cannot be loaded.
    """
    found = {one.name: one for one in use_workloads(given)}
    differences = {name: _difference(name, source, found) for name, source in recorded.items()}
    return {name: difference for name, difference in differences.items() if difference}


def _difference(name: str, source: WorkloadSource, found: Mapping[str, OwnWorkload]) -> str | None:
    if not found:
        return (
            f"{name!r} is not a built-in workload, and programs named in a record are not run. If you trust it, add "
            f"--workload {shlex.quote(source.locator)}, or the place of the file now"
        )
    if name not in found:
        return f"{', '.join({one.locator for one in found.values()})} no longer has a workload {name!r}"
    now = found[name]
    if now.sha256 == source.sha256:
        return None
    return (
        f"{now.locator} has changed since the run was recorded (the hash of its source and local imports was "
        f"{source.sha256[:12]}, and is {now.sha256[:12]}): restore that version, or run again"
    )
