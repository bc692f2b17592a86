"""The meanings of ``distributed_backend=``, and DataParallel for devices that are only simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Replicas(nn.Module):
    """A drop-in for ``torch.nn.DataParallel`` over ``count`` simulated devices.

    Inputs are split along dim 0 with ``torch.chunk``, outputs gathered along dim 0. As with DataParallel the
    module is called once a replica (its hooks fire each time), and its buffers after the call are those of
    the first one.
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
    """Return ``count`` shallow copies that share the module's weights, so that gradients add up, and its hooks.

    The first copy has the module's own buffers, so in-place changes to them stay. The others start with clones. What a
    forward assigns to an attribute is lost with its replica, as with DataParallel.
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


def scatter(inputs: Any, count: int) -> Sequence[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    0-d tensors and everything that is not a tensor go to each chunk whole, as with DataParallel.

    Raises:
        ValueError: The tensors of one batch fall into different numbers of chunks.

    """
    first = _first_tensor(inputs)
    return _scatter(inputs, count, 1 if first is None else _chunks(first.shape[0], count))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    for item in value:
        found = _first_tensor(item)
        if found is not None:
            return found
    return None


def _chunks(length: int, count: int) -> int:
    """Return how many chunks ``torch.chunk(count)`` makes: all have the same length, except the last one."""
    return -(-length // -(-length // count)) if length else count


def _scatter(value: Any, count: int, chunks: int) -> Sequence[Any]:
    if isinstance(value, Tensor):
        if not value.dim():
            return [value] * chunks
        parts = value.chunk(count)
        if len(parts) != chunks:
            raise ValueError(
                f"The tensors of a batch fall into {min(chunks, len(parts))} and {max(chunks, len(parts))} chunks over "
                f"{count} devices: give all of them the same length in dim 0, the batch."
            )
        return parts
    if isinstance(value, dict):
        columns = [_scatter(item, count, chunks) for item in value.values()]
        return [type(value)(zip(value, part, strict=True)) for part in _rows(columns, chunks)]
    if isinstance(value, (list, tuple)):
        columns = [_scatter(item, count, chunks) for item in value]
        return [_like(value, part) for part in _rows(columns, chunks)]
    return [value] * chunks


def _rows(columns: list[Sequence[Any]], chunks: int) -> Iterable[tuple[Any, ...]]:
    return zip(*columns, strict=True) if columns else [()] * chunks


def gather(outputs: list[Any]) -> Any:
    """Join the replicas' nested outputs along dim 0; their 0-d tensors become a vector.

    What is not a tensor comes back as it is where all replicas hold the same object, else as a list.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, dict):
        return type(first)([(key, gather([output[key] for output in outputs])) for key in first])
    if isinstance(first, (list, tuple)):
        return _like(first, [gather(list(part)) for part in zip(*outputs, strict=True)])
    return first if all(output is first for output in outputs) else list(outputs)


def _like(value: Any, items: Any) -> Any:
    """Return ``items`` as the same kind of list, tuple or named tuple as ``value``."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


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
