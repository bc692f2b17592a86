"""The environment variables that say which devices a process sees."""

from __future__ import annotations

import os

from plumbline.devices.counting import count
from plumbline.devices.types import device_type


def visible_names(name: str) -> list[str]:
    """Return the user's names of the devices of this type that this process sees; empty if it sees all of them."""
    visible = os.environ.get(device_type(name).visible or "", "")
    return visible.split(",") if visible else []


def only(name: str, first: int, number: int) -> dict[str, str]:
    """Return variables that let a process see only ``number`` devices, beginning with this process's device ``first``.

    Empty if the type has no such variable.
    """
    own = device_type(name)
    if own.visible is None:
        return {}
    named = visible_names(name)
    every = named or [str(device) for device in range(count(name))]
    # If the user gave numbers, they keep their meaning.
    numbering = {} if named else {key: os.environ.get(key, value) for key, value in own.numbering.items()}
    return {**numbering, own.visible: ",".join(every[first : first + number])}
