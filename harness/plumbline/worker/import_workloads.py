"""Imports the user's workloads into a fork server, so that its ranks inherit them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from plumbline.core.errors import WorkloadError
from plumbline.devices.calls import why_no_fork
from plumbline.devices.counting import in_child
from plumbline.own_workloads.load import calling, content_of, use_workloads
from plumbline.workloads import find


def import_workloads(locators: Sequence[str]) -> dict[str, Any]:
    """Import the workloads; return an event with a fingerprint of the weights and data of each one, by name.

    Its ``message`` says why one cannot be imported here; otherwise it is empty.
    """
    try:
        own = use_workloads(locators)
        if (label := why_no_fork()) is not None:
            raise WorkloadError(
                f"importing it starts {label}, which does not survive the fork of the ranks. Move the code that uses a "
                "device (.cuda(), torch.cuda.get_device_name(), …) into build() or columns()."
            )
        gc.collect()
        gc.freeze()  # for the same reason as in plumbline.worker.server
        return _contents_in_a_fork([one.name for one in own])
    except WorkloadError as error:
        return _event(message=str(error))


def _event(contents: dict[str, str] | None = None, message: str = "") -> dict[str, Any]:
    return {"event": "workloads", "contents": contents or {}, "message": message}


def _contents_in_a_fork(names: Sequence[str]) -> dict[str, Any]:
    """Build models and data in a child: the user's code may start threads or use a device, which survive no fork."""

    def contents() -> dict[str, Any]:
        try:
            with calling("building its model and data"):
                return _event({name: content_of(find(name)) for name in names})
        except WorkloadError as error:
            return _event(message=str(error))

    return in_child(contents) or _event(message="building its model or data ended the process")
