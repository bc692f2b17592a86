"""The meanings of ``distributed_backend=``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from plumbline.trainer.replicas import Replicas


@dataclass(frozen=True)
class Strategy:
    """A way to use several devices.

    ``splits``: each node has one process, which splits its batch over all devices; otherwise each device has a process.
    ``synchronises``: there are several processes, and DistributedDataParallel averages gradients over them. With
    ``stages``, each process has a part of the module instead, and all of them the same batches.
    """

    name: str
    splits: bool
    synchronises: bool
    stages: bool = False


STRATEGIES = {
    "none": Strategy("none", splits=False, synchronises=False),
    "dp": Strategy("dp", splits=True, synchronises=False),
    "ddp": Strategy("ddp", splits=False, synchronises=True),
    "ddp2": Strategy("ddp2", splits=True, synchronises=True),
    "balanced": Strategy("balanced", splits=False, synchronises=True, stages=True),
}


def split(module: nn.Module, devices: list[torch.device]) -> nn.Module:
    """Return ``module`` such that its forward spreads the batch over ``devices`` and gathers on the first."""
    if len(devices) == 1:
        return module
    if devices[0].type == "cuda":
        return nn.DataParallel(module, device_ids=devices)
    return Replicas(module, len(devices))
