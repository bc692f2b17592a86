"""The communication backend of torch.distributed for a type of device."""

from __future__ import annotations

import torch.distributed

from plumbline.devices.types import accelerators, device_type


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
