"""Which devices this process sees, counted without initialising one, and the variables that say so."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from plumbline.devices.types import accelerators, device_type, module_of, preferred


def count(name: str) -> int:
    """Return how many devices of this type there are; 0 if this torch does not have the type."""
    module = module_of(name)
    if module is None:
        return 0
    return int(module.device_count()) if device_type(name).counts_safely else _counted_apart(name)


def available() -> tuple[str, int]:
    """Return the type of accelerator that this torch and this machine have, and the number of its devices.

    Without any, it is ``cpu``, and the number is 0.
    """
    found = ((name, count(name)) for name in preferred())
    return next(((name, present) for name, present in found if present), ("cpu", 0))


def counts() -> dict[str, int]:
    """Return the number of devices of each type that this torch has. All are counted in a fork."""
    types = [name for name in accelerators() if module_of(name) is not None]
    return in_child(lambda: {name: int(module_of(name).device_count()) for name in types}) or {}


def device_names(name: str) -> tuple[str, ...] | None:
    """Return the name of each model of device, None if torch does not know it."""

    def ask() -> list[str]:
        module = module_of(name)
        return sorted({str(module.get_device_name(index)) for index in range(module.device_count())})

    found = in_child(ask)
    return tuple(found) if found else None


@lru_cache
def _counted_apart(name: str) -> int:
    return int(in_child(lambda: module_of(name).device_count()) or 0)


def in_child(ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` returns in a fork of this process, after a round trip through JSON; None if it fails.

    The fork keeps this process from initialising a device. On systems without fork, ``ask`` runs in this process.
    """
    if not hasattr(os, "fork"):
        return _answer(ask)
    source, sink = os.pipe()
    with warnings.catch_warnings():
        # The child calls nothing that waits for another thread.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            os.write(sink, json.dumps(_answer(ask)).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text or "null")


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # a runtime without its driver raises its own kind of error
        return None


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
