"""How far rounding alone moves the weights of a small problem on one device: what a program may not take for more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harness.core.precision import Precision
from harness.workloads import Workload

TIMES = 10
"""A program's difference is more than rounding where it is so many times what another precision makes."""


def tolerance(
    workload: Workload, precision: Precision, devices: int, steps: Sequence[Sequence[Sequence[int]]]
) -> float:
    """Return the largest difference of a weight after training that is still explained by rounding.

    Args:
        workload: the problem.
        devices: how many devices its data are for.
        precision: the cell's; its error is measured against float64, and of float64 one rounding is taken for it.
        steps: the shares of samples of each optimizer step, over all epochs.
    """
    storage = getattr(torch, precision.storage)
    exact = _trained(workload, torch.float64, None, devices, steps)
    rounded = _trained(workload, storage, precision.autocast, devices, steps)
    largest = max(float(one.abs().max()) for one in exact)
    differences = [float((one - other).abs().max()) for one, other in zip(exact, rounded, strict=True)]
    return TIMES * max(*differences, 10 * torch.finfo(storage).eps * largest)


def _trained(
    workload: Workload,
    dtype: torch.dtype,
    autocast: str | None,
    devices: int,
    steps: Sequence[Sequence[Sequence[int]]],
) -> list[Tensor]:
    """Return the weights in float64 after all steps, each the mean of its shares' losses."""
    model, data = workload.model(dtype).train(), workload.dataset(devices, dtype)
    optimizers = workload.optimizers(model.parameters())
    schedules = [one for one in map(workload.scheduler, optimizers) if one is not None]
    for shares in steps:
        for share in shares:
            batch = data.batch(share)
            with _cast(autocast):
                loss = workload.loss(model(batch), batch)
            (loss / len(shares)).backward()  # type: ignore[no-untyped-call]
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    return [parameter.detach().double() for parameter in model.parameters()]


def _cast(dtype: str | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cpu", getattr(torch, dtype))
