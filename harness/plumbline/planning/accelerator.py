"""Resolves ``--accelerator`` to a type of device and the number of these devices."""

from __future__ import annotations

import torch

from plumbline.core.errors import PlanError
from plumbline.devices.counting import available, count
from plumbline.devices.types import accelerators, device_type, module_of


def check_accelerator(requested: str) -> None:
    """Raise ``PlanError`` if no type of device has this name. This machine need not have such a device."""
    known = ("auto", "cpu", *accelerators())
    if requested not in known:
        raise PlanError(f"--accelerator {requested}: unknown type of device; choose from {', '.join(known)}")


def resolve_accelerator(requested: str) -> tuple[str, int]:
    """Return the accelerator for ``--accelerator``, which may be ``auto``, and the number of its devices.

    The number for ``cpu`` is 0, because the CPU simulates any number of devices.

    Raises:
        PlanError: this torch does not support the type, or this machine has no such device.
    """
    if requested == "auto":
        return available()
    if requested == "cpu":
        return "cpu", 0
    if module_of(requested) is None:
        known = ", ".join(("cpu", *(name for name in accelerators() if module_of(name) is not None)))
        raise PlanError(
            f"--accelerator {requested}: torch {torch.__version__} has no devices of this type; it has {known}"
        )
    present = count(requested)
    if not present:
        raise PlanError(
            f"--accelerator {requested}: this machine has no {device_type(requested).label} device; "
            "use --accelerator cpu"
        )
    return requested, present
