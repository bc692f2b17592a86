"""What ``distributed_backend=`` means: two independent choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from harness.trainer.replicas import Replicas


@dataclass(frozen=True)
class Strategy:
    """A way to use several devices.

    ``splits``: a process spreads its batch over all devices of its node (otherwise: a process a device).
    ``synchronises``: gradients are averaged over processes by DistributedDataParallel.
    """

    name: str
    splits: bool
    synchronises: bool


STRATEGIES = {
    "none": Strategy("none", splits=False, synchronises=False),
    "dp": Strategy("dp", splits=True, synchronises=False),
    "ddp": Strategy("ddp", splits=False, synchronises=True),
    "ddp2": Strategy("ddp2", splits=True, synchronises=True),
}


def split(module: nn.Module, devices: list[torch.device]) -> nn.Module:
    """Return ``module`` such that its forward spreads the batch over ``devices`` and gathers on the first."""
    if len(devices) == 1:
        return module
    if devices[0].type == "cuda":
        return nn.DataParallel(module, device_ids=devices)
    return Replicas(module, len(devices))
