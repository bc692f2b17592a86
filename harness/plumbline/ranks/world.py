"""The world of a launch: its backend, its rendezvous, and the environment variables that torchrun would set."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from plumbline.core.errors import LaunchError
from plumbline.launch.this_machine import ELASTIC, loopback
from plumbline.trainer.gpus import driver_started


@dataclass(frozen=True)
class World:
    """``size`` ranks on this machine that meet at ``listener``, a socket that listens before any rank is there.

    Without a ``backend`` they do not join a group: the variables are set with which the function can.
    """

    size: int
    backend: str | None
    address: str
    listener: socket.socket

    @classmethod
    def prepare(cls, size: int, backend: str | None, init: bool) -> World:
        """Return a world for ranks that will be forked from this process.

        Args:
            size: Number of ranks.
            backend: As ``init_process_group`` takes it; None is nccl where there is a CUDA device for each rank, else
                gloo.
            init: Whether they join the default process group.

        Raises:
            LaunchError: this system cannot fork, there are too few devices for nccl, or this process has started CUDA,
                which does not survive a fork.
        """
        if not hasattr(os, "fork"):
            raise LaunchError("ranks are forked, which this system cannot do: use Linux or macOS")
        devices = torch.cuda.device_count()  # by NVML: it does not start CUDA
        backend = backend or ("nccl" if devices >= size else "gloo")
        if init and "nccl" in backend:
            if devices < size:
                raise LaunchError(
                    f"nccl needs a CUDA device for each rank: {size} ranks, {devices} devices; use backend='gloo'"
                )
            if driver_started():
                raise LaunchError(
                    "this process has started CUDA, and ranks that are forked from it cannot use it. At import, "
                    "torch.cuda.is_available() starts it unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set; so do tests "
                    "and fixtures that use a device: run the tests with ranks in a process of their own (pytest -m "
                    "ranks), or use backend='gloo'"
                )
        address = loopback()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return cls(
            size, backend if init else None, address, socket.create_server((address, 0), family=family, backlog=1024)
        )

    def serve(self) -> TCPStore:
        """Return the store in which the ranks meet, in the process that holds it. It starts threads: fork before."""
        port = self.listener.getsockname()[1]
        descriptor = os.dup(self.listener.fileno())  # the store closes it
        return TCPStore(self.address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank: torchrun's, and those for ranks on one machine."""
        return {
            **ELASTIC,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.listener.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
            # Names of network interfaces differ between machines; ranks on one machine meet on loopback.
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            # torch's TCPStore looks up the name of its address, which is not needed; see launch/pool.py.
            "RES_OPTIONS": "timeout:1 attempts:1",
        }

    def join(self, rank: int) -> None:
        """Join the default process group as ``rank``, with the variables set."""
        if self.backend is None:
            return
        if "nccl" in self.backend:
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group(self.backend)


def separate_rendezvous() -> None:
    """Let each rendezvous of this process by the variables use keys of its own in the store.

    A function may destroy the default group and initialise it again. All such groups have the same name, and a second
    one would find the addresses that the first one wrote, where nobody listens any more.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    env, done = handlers["env"], 0

    def separate(*arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal done
        done += 1
        for store, rank, size in env(*arguments, **options):
            yield PrefixStore(f"rendezvous {done}", store), rank, size

    handlers["env"] = separate
