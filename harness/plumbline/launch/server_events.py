"""The events of a fork server: one JSON object per line, validated, as other processes could write there too."""

from __future__ import annotations

import json
import math
from typing import Any

from plumbline.core.errors import WorkloadError

_MAYBE_INT, _MAYBE_STR = (int, type(None)), (str, type(None))
_PLACE: dict[str, Any] = {"launch": int, "rank": int}
_CHILD: dict[str, Any] = {
    **_PLACE,
    "pid": int,
    "as": _MAYBE_INT,
    "trace": _MAYBE_INT,
    "steps": _MAYBE_INT,
    "failed": bool,
    "idle": bool,
    "killed": bool,
    "out_of_memory": bool,
    "unwritten": _MAYBE_STR,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "ready": {"subjects": list},
    "refused": {"message": str},
    "so_far": _PLACE,
    "evidence": _PLACE,
    "unwritten": {**_PLACE, "why": str},
    "late": {**_PLACE, "steps": int, "stopped": bool},
    "exit": {**_PLACE, "code": int, "steps": int, "evidence": bool, "out_of_memory": bool},
    "left": _CHILD,
    "gone": _CHILD,
    "reaped": {**_PLACE, "pid": int, "code": int},
    "raised": _PLACE,
    "listens": {"port": int},
    "reached": {"failed": dict},
    "port": {"port": int},
    "workloads": {"contents": dict, "message": str},
}
"""The fields of each event, besides ``at``: its time in seconds, on the monotonic clock."""


class NoEventError(ValueError):
    """A line is not a valid event of a fork server."""


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event in a line; raise ``NoEventError`` if it is not valid."""
    try:
        event: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoEventError(f"{line[:80]!r} is not JSON: {error}") from None
    fields = _FIELDS.get(str(event.get("event"))) if isinstance(event, dict) else None
    if fields is None:
        raise NoEventError(f"{line[:80]!r} is not an event")
    for name, kind in {**fields, "at": float}.items():
        if name not in event or not isinstance(event[name], kind):
            raise NoEventError(f"{event['event']!r} has no valid {name!r}")
    if not math.isfinite(event["at"]):
        raise NoEventError(f"{event['event']!r} has no finite 'at'")
    return event


def contents_of(event: dict[str, Any], place: str) -> dict[str, str]:
    """Return the fingerprints of the workloads that were imported at ``place``, by name.

    Raises:
        WorkloadError: A workload could not be imported there.
    """
    if event["message"]:
        raise WorkloadError(f"in {place}: {event['message']}")
    return dict(event["contents"])
