"""The strategies behind ``distributed_backend``, and DataParallel for simulated devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.trainer.nested import gather, scatter


@dataclass(frozen=True)
class Strategy:
    """A way to use several devices.

    ``splits``: each node has one process, which splits its batch over all devices; otherwise each device has a process.
    ``synchronises``: there are several processes, and DistributedDataParallel averages gradients over them.
    ``stages``: instead, each process has a part of the module, and all processes have the same batches.
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
    """Return ``module`` with a forward that splits the batch over ``devices`` and gathers outputs on the first."""
    if len(devices) == 1:
        return module
    if devices[0].type == "cuda":
        return nn.DataParallel(module, device_ids=devices)
    return Replicas(module, len(devices))


class Replicas(nn.Module):
    """A replacement for ``torch.nn.DataParallel`` over ``count`` simulated devices.

    Inputs are split along dim 0 with ``torch.chunk``, and outputs gathered along dim 0. As with DataParallel, the
    module and its hooks are called once per replica. Afterwards, the module has the first replica's buffers.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        self.count = count

    def forward(self, *inputs: Any) -> Any:
        shares = scatter(inputs, self.count)
        replicas = replicate(self.module, len(shares))
        return gather([replica(*share) for replica, share in zip(replicas, shares, strict=True)])


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Return ``count`` shallow copies that share the module's hooks and its weights, so that gradients are summed.

    The first copy has the module's own buffers, so that in-place changes persist. The others have clones. As with
    DataParallel, attributes that a forward sets are lost with its replica.
    """
    clones = [{id(buffer): buffer.clone() for buffer in module.buffers()} for _ in range(count - 1)]
    return [_replica(module, buffers) for buffers in ({}, *clones)]


def _replica(module: nn.Module, buffers: dict[int, Tensor]) -> nn.Module:
    replicas: dict[int, nn.Module] = {
        id(layer): layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for layer in module.modules()
    }
    for layer in module.modules():
        vars(replicas[id(layer)]).update(
            _parameters=layer._parameters.copy(),
            _buffers={name: buffers.get(id(buffer), buffer) for name, buffer in layer._buffers.items()},
            _modules={name: replicas.get(id(child)) for name, child in layer._modules.items()},
        )
    return replicas[id(module)]
