"""The types of device that are known by name. Other types work without an entry if torch has a module for them.

An entry says what torch does not. torch.distributed names the communication backend of a type.

A new type is one line in ``TYPES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed


@dataclass(frozen=True)
class DeviceType:
    """A type of device. ``name`` is torch's, as in ``torch.device``.

    ``visible`` is the environment variable with the devices that a process sees. If it is None, nodes that are
    simulated on one machine share its devices. ``numbering`` are variables that make the runtime number devices like
    the vendor's tools. ``shared_backend`` is the communication backend of ranks that share a device, if the type's own
    backend does not allow that. ``counts_safely``: counting devices does not initialise one. ``by_default``: ``auto``
    chooses this type if there is a device of it. ``indexed``: functions of its module take a device.
    """

    name: str
    visible: str | None = None
    numbering: Mapping[str, str] = field(default_factory=dict)
    shared_backend: str | None = None
    counts_safely: bool = False
    by_default: bool = True
    indexed: bool = True

    @property
    def label(self) -> str:
        """The type's name in messages."""
        return self.name.upper()

    @property
    def one(self) -> str:
        """One device of this type in messages."""
        return f"{'an' if self.label[0] in 'AEFHILMNORSX' else 'a'} {self.label} device"


TYPES: Final[Mapping[str, DeviceType]] = {
    one.name: one
    for one in (
        # NVML counts the devices, and NCCL cannot have two ranks on one device.
        DeviceType(
            "cuda",
            "CUDA_VISIBLE_DEVICES",
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            shared_backend="gloo",
            counts_safely=True,
        ),
        DeviceType("xpu", "ZE_AFFINITY_MASK"),
        # There is never more than one, so nothing could be distributed by default.
        DeviceType("mps", by_default=False, indexed=False),
        DeviceType("npu", "ASCEND_RT_VISIBLE_DEVICES"),
        DeviceType("mlu", "MLU_VISIBLE_DEVICES"),
        DeviceType("musa", "MUSA_VISIBLE_DEVICES"),
        DeviceType("hpu", "HABANA_VISIBLE_MODULES"),
        DeviceType("mtia"),
    )
}


def device_type(name: str) -> DeviceType:
    """Return the entry of this type. A type without an entry has only its name."""
    return TYPES.get(name, DeviceType(name))


def accelerators() -> tuple[str, ...]:
    """Return the names of all types but the CPU: those with an entry, and what an extension of torch registered."""
    name: str = torch._C._get_privateuse1_backend_name()
    return (*TYPES, name) if name not in TYPES and hasattr(torch, name) else tuple(TYPES)


def module_of(name: str) -> Any:
    """Return torch's module for this type, such as ``torch.cuda``; None if this torch has none."""
    # torch.get_device_module does the same, but raises, and torch 2.4 does not have it.
    module = getattr(torch, name, None) if name in accelerators() else None
    return module if hasattr(module, "device_count") else None


def preferred() -> tuple[str, ...]:
    """Return the types that ``auto`` can choose, in order of preference."""
    # torch.accelerator asks CUDA's driver, which then does not survive a fork.
    found = ["cuda"]
    if not torch.backends.cuda.is_built() and hasattr(torch, "accelerator"):  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # torch 2.6 raises if there is none
            current = torch.accelerator.current_accelerator()
            found += [current.type] if current is not None else []
    return tuple(name for name in found if device_type(name).by_default)


def backend_of(name: str, *, shared: bool = False) -> str | None:
    """Return the backend for devices of this type, None if none is registered. ``shared``: ranks share a device."""
    own = device_type(name).shared_backend if shared else None
    return own or _defaults().get(name)


def device_of(backend: str) -> str:
    """Return the type of device whose own backend is ``backend``, or one of several in it; ``cpu`` for gloo."""
    given = {part.rpartition(":")[2] for part in backend.split(",")} - {backend_of("cpu")}
    return next((name for name in accelerators() if backend_of(name) in given), "cpu")


def _defaults() -> dict[str, str]:
    if not torch.distributed.is_available():
        return {"cpu": "gloo"}
    # Extensions of torch add their backends here, with torch.distributed.Backend.register_backend.
    return torch.distributed.Backend.default_device_backend_map
