"""The workloads of the user's own that a recorded run was judged by: are they there, and what they were?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from plumbline.own_workloads.load import OwnWorkload, use_workloads
from plumbline.results.header_footer import WorkloadSource


def use_recorded_workloads(recorded: Mapping[str, WorkloadSource], given: Sequence[str] = ()) -> dict[str, str]:
    """Load the workloads of a run from where the user says that they are.

    Not from where the run says that they were: it may come from anywhere, and they are programs.

    Returns:
        For each that was not given, is missing or has changed, by its name, why it cannot be judged by.

    Raises:
        WorkloadError: one of ``given`` cannot be loaded.
    """
    found = {one.name: one for one in use_workloads(given)}
    differences = {name: _difference(name, source, found) for name, source in recorded.items()}
    return {name: difference for name, difference in differences.items() if difference}


def _difference(name: str, source: WorkloadSource, found: Mapping[str, OwnWorkload]) -> str | None:
    if not found:
        return (
            f"{name!r} is a workload of the user's own, a program, which is not run because a record names it: if you "
            f"trust it, add --workload {shlex.quote(source.locator)}, or where the file is now"
        )
    if name not in found:
        return f"{', '.join({one.locator for one in found.values()})} has no workload {name!r} any more"
    now = found[name]
    if now.sha256 == source.sha256:
        return None
    return (
        f"{now.locator} has changed since the run was recorded (its source, with what it imports from beside it, was "
        f"{source.sha256[:12]} and is {now.sha256[:12]}): the traces cannot be judged by another problem than was "
        "trained. Put that version back, or run again"
    )
