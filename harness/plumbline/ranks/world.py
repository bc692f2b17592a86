"""The properties that the ranks of a launch share: their number, their backend and their rendezvous."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from plumbline.core.errors import LaunchError
from plumbline.devices.calls import is_initialised, set_current
from plumbline.devices.counting import available, count
from plumbline.devices.types import backend_of, device_of, device_type
from plumbline.launch.this_machine import (
    QUICK_RESOLVER,
    listen,
    local_variables,
    loopback,
    store_on,
    torchrun_variables,
)


@dataclass(frozen=True)
class World:
    """``size`` ranks on this machine that meet at ``listener``, a socket that listens before the ranks start.

    Without a ``backend``, ranks do not join a process group; the function can initialise one itself. ``accelerator`` is
    the type of device that the backend needs for each rank.
    """

    size: int
    backend: str | None
    address: str
    listener: socket.socket
    accelerator: str = "cpu"

    @classmethod
    def prepare(cls, size: int, backend: str | None, init: bool) -> World:
        """Return a world for ranks that will be forked from this process; the arguments are ``run_on_ranks``'s."""
        if not hasattr(os, "fork"):
            raise LaunchError("this system cannot fork processes, as ranks require: use Linux or macOS")
        backend = backend or _backend_for(size)
        accelerator = device_of(backend) if init else "cpu"
        if accelerator != "cpu":
            _require_devices(accelerator, size)
        address = loopback()
        return cls(size, backend if init else None, address, listen(address), accelerator)

    def serve(self) -> TCPStore:
        """Return the store in which the ranks meet. It starts threads: fork before this call."""
        return store_on(self.listener, self.address)

    def variables(self, rank: int) -> dict[str, str]:
        return {
            **torchrun_variables(rank, self.size, self.size),
            **local_variables(self.address),
            **QUICK_RESOLVER,
            "MASTER_PORT": str(self.listener.getsockname()[1]),
        }

    def join(self, rank: int) -> None:
        """Join the default process group; the environment variables of ``rank`` are set."""
        if self.backend is None:
            return
        set_current(torch.device(self.accelerator, rank))
        torch.distributed.init_process_group(self.backend)


def _backend_for(size: int) -> str:
    name, devices = available()
    return (backend_of(name) or "gloo") if devices >= size else "gloo"


def _require_devices(accelerator: str, size: int) -> None:
    """Check that ranks that are forked from this process can use a device each."""
    devices, own = count(accelerator), device_type(accelerator)
    if devices < size:
        raise LaunchError(
            f"{backend_of(accelerator)} needs {own.one} for each rank, but there are {size} ranks and {devices} "
            "devices: use backend='gloo'"
        )
    if is_initialised(accelerator):
        too = _STARTED_BY.get(accelerator, "")
        raise LaunchError(
            f"this process has started {own.label}, so ranks that are forked from it cannot use {own.label}. Tests and "
            f"fixtures that use a device start it{too}. Run the tests with ranks in a separate process (pytest -m "
            "ranks), or use backend='gloo'."
        )


_STARTED_BY = {
    "cuda": ", and so does torch.cuda.is_available() at import, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set",
}
"""Other ways in which a process initialises a type of device."""


def separate_rendezvous() -> None:
    """Give each rendezvous of this process its own keys in the store.

    Default groups all have the same name. A function that initialises a second one would find the addresses of the
    first, at which no rank listens any more.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    env, done = handlers["env"], 0

    def separate(*arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal done
        done += 1
        for store, rank, size in env(*arguments, **options):
            yield PrefixStore(f"rendezvous {done}", store), rank, size

    handlers["env"] = separate
