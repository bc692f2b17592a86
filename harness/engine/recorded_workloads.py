"""The workloads of the user's own that a recorded run was judged by: are they there, and what they were?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.core.errors import WorkloadError
from harness.own_workloads.load import OwnWorkload, use_workloads
from harness.results.header_footer import WorkloadSource


def use_recorded_workloads(recorded: Mapping[str, WorkloadSource], moved: Sequence[str] = ()) -> dict[str, str]:
    """Load the workloads of a run: from ``moved``, where that is given, else from where they were.

    Returns:
        For each that is missing or has changed, by its name, why it cannot be judged by.

    Raises:
        WorkloadError: one of ``moved`` cannot be loaded.
    """
    obstacles: dict[str, str] = {}
    there: list[str] = []
    for locator in dict.fromkeys(source.locator for source in recorded.values()) if not moved else ():
        try:
            use_workloads([locator])
            there.append(locator)
        except WorkloadError as error:
            why = (
                f"{str(error).removeprefix('--workload ')}; it was given to the run as --workload {locator}: judge the "
                "run in the folder where that was typed, or say where the file is now with --workload"
            )
            obstacles |= {name: why for name, source in recorded.items() if source.locator == locator}
    found = {one.name: one for one in use_workloads([*moved, *there])}
    for name, source in recorded.items():
        if name not in obstacles and (difference := _difference(name, source, found)):
            obstacles[name] = difference
    return obstacles


def _difference(name: str, source: WorkloadSource, found: Mapping[str, OwnWorkload]) -> str | None:
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
